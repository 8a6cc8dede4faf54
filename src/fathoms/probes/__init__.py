"""What happens inside a model, block by block."""
