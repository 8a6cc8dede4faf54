"""Comparisons: variants of a model over seeds, with statistics that hold for a handful of them."""
