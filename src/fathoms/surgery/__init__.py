"""Change a model that exists already: swap its norms, fold its scales away, run its attention fused."""
