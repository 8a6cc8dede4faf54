"""Data sources: image folders, tar shards, packs, arrays, Hugging Face data sets."""
