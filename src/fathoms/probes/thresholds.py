"""Every threshold of the probe's verdicts. `benchmarks/probe_calibration.py` measures how well they predict."""

from __future__ import annotations

FLAT_SLOPE = 0.25
"""Coordinate check: |d log rise / d log size| up to which the rise counts as flat. CompleteP's authors call 0 right;
wrong parametrisations of a ViT measured 0.7 and more, right ones 0.1 and less."""
