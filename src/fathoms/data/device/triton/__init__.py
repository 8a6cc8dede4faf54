"""Triton kernels for images on a GPU. Needs triton, so it is imported only where it is chosen."""
