"""Norms with statistics of each token, and the statistics-free functions that take their place."""
