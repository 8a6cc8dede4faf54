"""Loader for evaluation: every image once over all ranks, without padding."""

from __future__ import annotations

import torch

from fathoms.data import (
    ArraySource,
    Augment,
    AugmentOptions,
    EvalView,
    Loader,
    LoaderOptions,
    Plan,
    ResidentLoader,
    Source,
)
from fathoms.errors import ConfigError
from fathoms.evaluate.preprocessing import Preprocessing

AnyLoader = Loader | ResidentLoader


def eval_loader(
    source: Source | ArraySource,
    size: int,
    batch_size: int,
    preprocessing: Preprocessing,
    *,
    workers: int = 0,
    device: torch.device | str = "cpu",
    share: tuple[int, int] = (0, 1),
) -> AnyLoader:
    """A loader of every image of a split once, resized, cropped at the centre and normalised.

    Args:
        source: The images.
        size: Side of the images that the model takes.
        batch_size: Images per batch.
        preprocessing: Resize, crop and normalisation; arrays are never cropped.
        workers: Decoding threads; 0 is one per core.
        device: Where batches go.
        share: This rank, and the number of ranks.
    """
    rank, world = share
    plan = Plan(len(source), batch_size, order="sequential", world=world, rank=rank)
    augment = Augment(
        AugmentOptions(mean=preprocessing.mean, std=preprocessing.std), train=False, device=device
    )
    if isinstance(source, ArraySource):
        if preprocessing.crop_pct not in (None, 1.0):
            raise ConfigError(
                f"--crop-pct {preprocessing.crop_pct}: arrays are evaluated whole; leave it out or use 1.0"
            )
        return ResidentLoader(source, plan, size, None, augment, device, preprocessing.interpolation)
    view = EvalView(size, preprocessing.file_crop, preprocessing.interpolation)
    return Loader(source, plan, view, augment, LoaderOptions(workers=workers), device)
