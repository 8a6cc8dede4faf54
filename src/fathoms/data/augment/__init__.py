"""Batched augmentation in plain torch, drawn from counters."""
