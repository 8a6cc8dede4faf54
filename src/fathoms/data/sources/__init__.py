"""Where images come from: folders, tar shards, packs, arrays, Hugging Face data sets."""
