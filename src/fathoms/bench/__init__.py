"""Throughput and memory of training and inference, next to timm's models."""

from fathoms.bench.race import Contender, Setting, prepare, race

__all__ = ["Contender", "Setting", "prepare", "race"]
