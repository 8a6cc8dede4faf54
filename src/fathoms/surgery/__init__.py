"""Change an existing model: swap its norms, fold its scales into its matrices, or run its attention faster."""
