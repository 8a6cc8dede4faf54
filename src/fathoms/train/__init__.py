"""Training: the recipe, the optimizers, the losses and the loop that runs them."""
