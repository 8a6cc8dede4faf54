"""Augmentation in torch, drawn from a counter-based generator: policies, jitter, erasing, mixup and cutmix."""
