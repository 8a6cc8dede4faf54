"""Throughput and memory of training and inference, next to timm's models: see `fathoms.bench.race`."""
