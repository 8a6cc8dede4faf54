"""Triton kernels, imported only where one is chosen: this package needs triton to be installed."""
