"""Random erasing: rectangles of a normalised batch replaced by zero, one colour, or noise.

Paper: Zhong et al. 2017, arXiv:1708.04896.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fathoms.data.augment.batched import put_rows
from fathoms.data.augment.masks import inside_boxes
from fathoms.data.counter_rng import device_uniforms, sample_keys, uniforms
from fathoms.data.to_device import to_device
from fathoms.errors import ConfigError
from fathoms.names.registry import check_name

MODES = ("const", "rand", "pixel")
_TRIES = 10


def check_erasing(reprob: float, remode: str, recount: int) -> None:
    """Refuse options out of range."""
    check_name(remode, MODES, "erasing mode", "--remode")
    if not 0 <= reprob <= 1:
        raise ConfigError(f"--reprob {reprob}: is not a probability; use 0 to 1")
    if recount < 1:
        raise ConfigError(f"--recount {recount}: is too small; use 1 or more")


def draw_rectangles(keys: np.ndarray, prob: float, count: int, height: int, width: int) -> np.ndarray:
    """Draw rectangles (B, count, 4) of top, left, height, width; a height of zero erases nothing.

    An area between 2 % and a third of the image (shared among the rectangles), an aspect between
    0.3 and 1 / 0.3; the first of ten draws that is smaller than the image.
    """
    out = np.zeros((len(keys), count, 4), np.int64)
    gate = uniforms(keys, 2)
    rows = np.flatnonzero(gate[:, 0] < prob)
    number = 1 + np.floor(gate[rows, 1] * count)
    per_box = 2 * _TRIES + 2
    body = uniforms(keys[rows], count * per_box, first=2).reshape(len(rows), count, per_box)
    area = height * width * (0.02 + (1 / 3 - 0.02) * body[..., :_TRIES]) / number[:, None, None]
    reach = math.log(1 / 0.3)
    aspect = np.exp(reach * (2 * body[..., _TRIES : 2 * _TRIES] - 1))
    tall, wide = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (tall < height) & (wide < width)
    first = fits.argmax(-1)[..., None]
    tall = np.take_along_axis(tall, first, -1)[..., 0]
    wide = np.take_along_axis(wide, first, -1)[..., 0]
    top = np.floor(body[..., -2] * (height - tall + 1))
    left = np.floor(body[..., -1] * (width - wide + 1))
    used = (np.arange(count) < number[:, None]) & fits.any(-1)
    out[rows] = np.stack([top, left, np.where(used, tall, 0), wide], -1)
    return out


def normal_noise(draws: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard normal numbers from uniform ones in steps of 2^-24; all are finite.

    Each step is exact in float32 in this order. Adding the half step before the 1 is taken off would round the
    largest draw up to 1, whose normal is infinite: one pixel in 17 million, so one erased image in a hundred.
    """
    return math.sqrt(2) * torch.erfinv(2 * draws - 1 + 2.0**-24)


def erase(
    images: Float[Tensor, "B C H W"], rectangles: np.ndarray, mode: str, keys: np.ndarray
) -> Float[Tensor, "B C H W"]:
    """Fill the rectangles, in place; samples without one are not touched."""
    rows = np.flatnonzero(rectangles[..., 2].any(-1))
    if not len(rows):
        return images
    device, (channels, height, width) = images.device, images.shape[1:]
    top, left, tall, wide = np.moveaxis(rectangles[rows], -1, 0)
    box = np.stack([top, top + tall, left, left + wide], -1)
    # Noise has a key of its own; otherwise its first numbers would be those that drew the rectangles.
    own = sample_keys(0, 0, "noise", keys[rows].view(np.int64)).view(np.int64)
    where, edges, own = to_device([rows, box, own], device)
    inside = inside_boxes(edges, height, width).any(1)[:, None]
    noise: Tensor | float = 0.0
    if mode != "const":
        pixels = height * width if mode == "pixel" else 1
        draws = device_uniforms(own, channels * pixels)
        noise = normal_noise(draws)
        shape = (-1, channels, height, width) if mode == "pixel" else (-1, channels, 1, 1)
        noise = noise.view(shape).to(images.dtype)
    picked = images.index_select(0, where)
    return put_rows(images, rows, where, torch.where(inside, noise, picked))
