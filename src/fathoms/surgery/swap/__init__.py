"""Swap the norms of a model, calibrated to what each norm did."""
