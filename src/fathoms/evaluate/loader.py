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

AnyLoader = Loader | ResidentLoader

FILE_CROP = 0.9
"""Default share of each side of an image file that the centre crop keeps."""


def eval_loader(
    source: Source | ArraySource,
    size: int,
    batch_size: int,
    *,
    crop_pct: float | None,
    interpolation: str,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    workers: int = 0,
    device: torch.device | str = "cpu",
    share: tuple[int, int] = (0, 1),
) -> AnyLoader:
    """A loader of every image of a split once, resized, cropped at the centre and normalised.

    Args:
        source: The images.
        size: Side of the images that the model takes.
        batch_size: Images per batch.
        crop_pct: Share of each side that the crop keeps; None is 0.9 for image files. Arrays are never
            cropped.
        interpolation: Filter of the resize.
        mean: Per-channel mean that is subtracted.
        std: Per-channel standard deviation to divide by.
        workers: Decoding threads; 0 is one per core.
        device: Where batches go.
        share: This rank, and the number of ranks.
    """
    rank, world = share
    plan = Plan(len(source), batch_size, order="sequential", world=world, rank=rank)
    augment = Augment(AugmentOptions(mean=mean, std=std), train=False, device=device)
    if isinstance(source, ArraySource):
        if crop_pct not in (None, 1.0):
            raise ConfigError(f"--crop-pct {crop_pct}: arrays are evaluated whole; leave it out or use 1.0")
        return ResidentLoader(source, plan, size, None, augment, device, interpolation)
    view = EvalView(size, FILE_CROP if crop_pct is None else crop_pct, interpolation)
    return Loader(source, plan, view, augment, LoaderOptions(workers=workers), device)
