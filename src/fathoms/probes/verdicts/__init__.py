"""Verdicts of the probe: on the start of training, and on drift while it goes on."""
