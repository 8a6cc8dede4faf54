"""Throughput and memory of training and inference, beside timm's models."""
