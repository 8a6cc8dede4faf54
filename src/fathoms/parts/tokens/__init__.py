"""Tokens from pixels to the heads: stems, positions, read-outs."""
