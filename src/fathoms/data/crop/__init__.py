"""Crops: random boxes, decoding of the part that is used, pixel buffers, training and evaluation transforms."""
