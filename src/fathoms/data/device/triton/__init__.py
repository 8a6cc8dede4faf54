"""Triton kernels for pictures on a GPU, imported only where they are chosen: this package needs triton."""
