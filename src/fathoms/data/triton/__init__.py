"""Triton kernels of the data pipeline, imported only where they are chosen: this package needs triton."""
