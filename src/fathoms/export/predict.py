"""Classify picture files: which classes, how sure, and where the model looked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fathoms.data.decode import choose_decoder
from fathoms.data.errors import BadImageError
from fathoms.data.header import MAX_FILE
from fathoms.data.resize import evaluation_pixels
from fathoms.errors import FathomsError
from fathoms.export.attention import attention_maps
from fathoms.models.vit import ViT
from fathoms.reading import read_names, read_plain

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


@dataclass(frozen=True)
class Prediction:
    """One picture's answer.

    Args:
        file: The picture.
        classes: Names or numbers of the likeliest classes, the likeliest first.
        probabilities: How likely each is.
        problem: Why there is no answer; "" if there is one.
        attention: How much of the answer comes from each patch, (grid, grid); None if not asked for.
        pixels: What the model saw, before normalisation; kept only with `attention`.
    """

    file: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    problem: str = ""
    attention: Tensor | None = None
    pixels: Tensor | None = None


def list_pictures(paths: Iterable[Path]) -> list[Path]:
    """The files that are given, and the pictures under the folders that are; none is an error."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS)
        elif path.is_file():
            found.append(path)
        else:
            raise FathomsError(f"{path}: no such file or folder; give pictures or folders of them")
    if not found:
        raise FathomsError(f"no picture ({', '.join(ENDINGS)}) is there; give files or folders of them")
    return found


def read_classes(path: Path | None, number: int) -> list[str]:
    """Names of the classes, one a line; their numbers where there is no file."""
    if path is None:
        return [str(index) for index in range(number)]
    names = list(read_names(path))
    if len(names) != number:
        raise FathomsError(f"{path}: {len(names)} names for {number} classes; give one a line")
    return names


@torch.no_grad()
def predict(
    model: ViT,
    files: list[Path],
    *,
    classes: list[str],
    top: int = 5,
    batch_size: int = 32,
    crop_pct: float = 0.9,
    mean: tuple[float, ...] = (0.5, 0.5, 0.5),
    std: tuple[float, ...] = (0.5, 0.5, 0.5),
    attention: bool = False,
) -> Iterator[Prediction]:
    """The likeliest classes of each picture, in order; one that cannot be read has a `problem` instead."""
    if not 1 <= top <= len(classes):
        raise FathomsError(f"--top {top}: use 1 to {len(classes)}, the number of classes")
    decoder = choose_decoder()
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    channels = model.config.in_channels
    home = next(model.parameters())
    for start in range(0, len(files), batch_size):
        seen: dict[Path, Tensor] = {}
        problems: dict[Path, str] = {}
        for file in files[start : start + batch_size]:
            try:
                pixels = evaluation_pixels(
                    decoder.decode(read_plain(file, MAX_FILE)), model.config.image_size, crop_pct
                )
                seen[file] = pixels.float() / 255
            except (BadImageError, OSError) as error:
                problems[file] = " ".join(str(error).split())
        rows: dict[Path, Prediction] = {}
        if seen:
            images = (torch.stack(list(seen.values())) - shift) / scale
            images = images.mean(1, keepdim=True) if channels == 1 else images
            images = images.to(home.device, home.dtype)
            values, indices = model.eval()(images).float().softmax(-1).topk(top)
            maps = attention_maps(model, images).float().cpu() if attention else [None] * len(images)
            for file, value, index, drawn in zip(seen, values.tolist(), indices.tolist(), maps, strict=True):
                names = tuple(classes[i] for i in index)
                kept = seen[file] if attention else None
                rows[file] = Prediction(str(file), names, tuple(value), "", drawn, kept)
        for file in files[start : start + batch_size]:
            yield rows.get(file) or Prediction(str(file), problem=problems[file])


def overlay(prediction: Prediction, path: Path) -> None:
    """Draw a picture with what the model looked at kept bright and the rest darkened."""
    from PIL import Image

    assert prediction.attention is not None
    assert prediction.pixels is not None
    size = prediction.pixels.shape[-2:]
    maps = prediction.attention[None, None] / prediction.attention.max()
    light = torch.nn.functional.interpolate(maps, size, mode="bilinear", align_corners=False)[0]
    shown = prediction.pixels * (0.25 + 0.75 * light)
    Image.fromarray((shown.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()).save(path)
