"""Loader for evaluation: every image once over all ranks, without padding."""

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
from fathoms.evaluate.preprocessing import Preprocessing

AnyLoader = Loader | DeviceLoader


def check_crop(crop_pct: float | None, source: Source | ArraySource) -> None:
    """Refuse a --crop-pct that would not be used."""
    if isinstance(source, ArraySource) and crop_pct not in (None, 1.0):
        raise ConfigError(f"--crop-pct {crop_pct}: arrays are evaluated whole; leave it out or use 1.0")


def eval_loader(
    source: Source | ArraySource,
    size: int,
    batch_size: int,
    preprocessing: Preprocessing,
    *,
    options: LoaderOptions | None = None,
    device: torch.device | str = "cpu",
    share: tuple[int, int] = (0, 1),
) -> AnyLoader:
    """A loader of every image of a split once, resized, cropped at the centre and normalised.

    Args:
        source: The images.
        size: Side of the images that the model takes.
        batch_size: Images per batch.
        preprocessing: Resize, crop and normalisation; arrays are never cropped.
        options: Workers, limits, and whether images are read as grey; arrays only know the last.
        device: Where batches go.
        share: This rank, and the number of ranks.
    """
    options, (rank, world) = options or LoaderOptions(), share
    sampler = Sampler(len(source), batch_size, order="sequential", world=world, rank=rank)
    backend = choose_backend("auto", torch.device(device))
    normal = AugmentOptions(mean=preprocessing.mean, std=preprocessing.std)
    augment = Augment(normal, train=False, device=device, backend=backend)
    if isinstance(source, ArraySource):
        filter_ = preprocessing.interpolation
        return DeviceLoader(source, sampler, size, None, augment, device, filter_, options.grey)
    transform = EvalTransform(size, preprocessing.crop(size), preprocessing.interpolation)
    return Loader(source, sampler, transform, augment, options, device)
