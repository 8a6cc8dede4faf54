"""Checkpoints: write, verify, prune, resume."""
