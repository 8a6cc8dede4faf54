"""The Vision Transformer, its config, its names and its weights."""
