"""The Vision Transformer: config, model, named models and weights. The public names are in `fathoms` itself."""
