"""The loader of an evaluation: every picture once, over all ranks, never padded."""

from __future__ import annotations

import torch

from fathoms.data import (
    ArraySource,
    Augment,
    AugmentOptions,
    DeviceLoader,
    EvalTransform,
    Loader,
    LoaderOptions,
    Sampler,
    Source,
    choose_backend,
)
from fathoms.errors import ConfigError

AnyLoader = Loader | DeviceLoader

PHOTO_CROP = 0.9
"""Share of a photo that is kept where nobody says otherwise."""


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
    """Every picture of a split once, resized, cropped in the middle and normalised.

    Args:
        source: The pictures.
        size: Side of the images that the model takes.
        batch_size: Images at a time.
        crop_pct: Share of the picture that is kept; None is 0.9 of a photo and all of an array, and arrays
            are never cropped.
        interpolation: Filter of the resize.
        mean: Subtracted from the colours.
        std: What they are divided by.
        workers: Decoding threads; 0 is one per core.
        device: Where batches go.
        share: This rank, and how many there are.
    """
    rank, world = share
    sampler = Sampler(len(source), batch_size, order="sequential", world=world, rank=rank)
    backend = choose_backend("auto", torch.device(device))
    augment = Augment(AugmentOptions(mean=mean, std=std), train=False, device=device, backend=backend)
    if isinstance(source, ArraySource):
        if crop_pct not in (None, 1.0):
            raise ConfigError(f"crop_pct={crop_pct}: arrays are judged whole; leave it out or use 1.0")
        return DeviceLoader(source, sampler, size, None, augment, device, interpolation)
    transform = EvalTransform(size, PHOTO_CROP if crop_pct is None else crop_pct, interpolation)
    return Loader(source, sampler, transform, augment, LoaderOptions(workers=workers), device)
