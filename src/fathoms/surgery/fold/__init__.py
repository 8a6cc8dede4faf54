"""Fold scales and affine parts into the linears beside them."""
