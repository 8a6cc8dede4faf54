"""Triton kernels; imported only where one is chosen, since this package needs triton to be installed."""
