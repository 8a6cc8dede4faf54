"""A dozen held-out images with the model's predictions, as plain data for the report page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.data import LoaderOptions
from fathoms.data.sources.subset import subset
from fathoms.evaluate.loader import AnyLoader, eval_loader
from fathoms.evaluate.preprocessing import Preprocessing
from fathoms.models.inference_mode import in_inference

COUNT = 12
SIDE = 128
"""Pixels of a stored image at most; smaller ones keep their size."""
TOP = 3


def choose(correct: Sequence[bool], count: int = COUNT) -> list[int]:
    """Indices of images to show: half of them mistakes if there are that many, evenly spread over the split.

    >>> choose([True, False, True, True, False, True], 4)
    [1, 4, 0, 5]
    """
    hits = np.array(correct, bool)
    wrong, right = np.flatnonzero(~hits), np.flatnonzero(hits)
    mistakes = max(min(count // 2, len(wrong)), count - len(right))
    return [*spread(wrong, mistakes), *spread(right, count - mistakes)]


def spread(indices: np.ndarray, count: int) -> list[int]:
    """At most `count` of the indices, evenly spaced from the first to the last."""
    if len(indices) <= count:
        return indices.tolist()
    return indices[np.linspace(0, len(indices) - 1, count).round().astype(int)].tolist() if count else []


@torch.no_grad()
def examples(
    model: nn.Module,
    loader: AnyLoader,
    indices: Sequence[int],
    size: int,
    preprocessing: Preprocessing,
    *,
    device: torch.device | str = "cpu",
    amp_dtype: torch.dtype | None = None,
) -> list[dict[str, Any]]:
    """Name, label, likeliest classes and pixels of some images of a split; those that cannot be read are left out.

    Args:
        model: Images to logits.
        loader: The split.
        indices: Which images of it.
        size: Side of the images that the model takes.
        preprocessing: As in the evaluation.
        device: Where the model is.
        amp_dtype: Autocast dtype; None for full precision.
    """
    source = loader.source
    part = subset(source, np.array(indices, np.int64), source.split)
    shown: list[dict[str, Any]] = []
    kind = torch.device(device).type
    options = LoaderOptions(workers=1, grey=loader.grey)
    with in_inference(model):
        batches = eval_loader(part, size, len(indices), preprocessing, options=options, device=device)
        for batch in batches.epoch(0):
            with torch.autocast(kind, dtype=amp_dtype, enabled=amp_dtype is not None):
                logits = model(batch.images)
            chances, classes = logits.float().softmax(1).topk(min(TOP, logits.shape[1]))
            pixels = _pixels(batch.images, preprocessing)
            rows = (batch.ids, batch.labels, chances, classes)
            for place, (index, label, chance, kinds) in enumerate(
                zip(*(row.tolist() for row in rows), strict=True)
            ):
                if label >= 0:
                    top = [[one, round(p, 4)] for one, p in zip(kinds, chance, strict=True)]
                    png = _png(pixels[place])
                    shown.append({"name": part.where(index), "label": label, "top": top, "png": png})
    return shown


def _pixels(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Normalised images as bytes again, channels last."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    plain = images.float().cpu() * std + mean
    return (plain.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous()


def _png(pixels: Tensor) -> str:
    """An image as base64 of a PNG file, at most `SIDE` pixels wide."""
    from PIL import Image

    image = Image.fromarray(pixels.numpy())
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
