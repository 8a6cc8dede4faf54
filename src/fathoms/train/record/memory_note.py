"""Warn before training on a CPU if an update does not fit into memory; the system would kill the process silently."""

from __future__ import annotations

import torch
from torch import nn

from fathoms.machine.memory import usable_memory
from fathoms.models.vit import ViT
from fathoms.train.job import Job

LEAST = 8
"""Numbers that a block keeps for the backward pass for each channel of a token, at the very least."""


def memory_notes(job: Job, model: nn.Module, batch_size: int, precision: str) -> list[str]:
    """A line if an update needs more memory than there is, by the estimate of `fathoms cost`; else none.

    It is measured with one image and with two, and only where a bound from the config alone comes near the limit, so
    that it delays no run that fits by far.
    """
    memory = usable_memory()
    if memory is None or not isinstance(model, ViT) or job.recipe.grad_checkpointing:
        return []
    config = model.config
    kept = LEAST * 4 * config.grid**2 * config.dim * config.depth
    if kept * batch_size < memory / 8:
        return []
    from fathoms.probes.cost import update_memory

    image = torch.zeros(1, config.in_channels, config.image_size, config.image_size)
    needed = update_memory(model, image, batch_size, precision, job.recipe.opt)
    if needed < memory:
        return []
    return [
        f"memory: a batch of {batch_size} needs about {needed / 2**30:.3g} GiB, and this machine has "
        f"{memory / 2**30:.3g}; a smaller --batch-size or a larger --patch-size needs less"
    ]
