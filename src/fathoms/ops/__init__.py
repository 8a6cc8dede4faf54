"""Fused operations, each with its reference in plain torch beside it."""
