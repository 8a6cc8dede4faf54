"""Recipes: the training options under timm's names, the files they are read from, options nothing would read."""
