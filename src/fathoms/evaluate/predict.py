"""Classify picture files: which classes, how sure, and where the model looked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathoms.data.crop.resize import evaluation_pixels
from fathoms.data.decode.decode import choose_decoder
from fathoms.data.errors import BadImageError
from fathoms.data.sources.base import IMAGE_SUFFIXES, MAX_FILE, is_image
from fathoms.errors import FathomsError
from fathoms.evaluate.preprocessing import Look
from fathoms.models.inference_mode import in_inference
from fathoms.models.vit import ViT
from fathoms.probes.attention_maps import attention_maps
from fathoms.reading import read_names, read_plain

LOOK = Look()


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

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data, without the pictures."""
        return {name: getattr(self, name) for name in ("file", "classes", "probabilities", "problem")}


def list_pictures(paths: Iterable[Path]) -> list[Path]:
    """The files that are given, and the pictures under the folders that are; none is an error."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if is_image(p.name))
        elif path.is_file():
            found.append(path)
        else:
            raise FathomsError(f"{path}: no such file or folder; give pictures or folders of them")
    if not found:
        raise FathomsError(
            f"no picture ({', '.join(IMAGE_SUFFIXES)}) is there; give files or folders of them"
        )
    return found


def class_names(path: Path | None, known: Sequence[str] | None, number: int) -> Sequence[str]:
    """Names of the classes: from a file with one a line, else those that are known, else their numbers."""
    if path is None and known is None:
        return [str(index) for index in range(number)]
    names = read_names(path) if path is not None else known or ()
    if len(names) != number:
        raise FathomsError(f"{path or 'classes'}: {len(names)} names for {number} classes; give one a line")
    return names


@torch.no_grad()
def predict(
    model: ViT,
    files: list[Path],
    *,
    classes: Sequence[str],
    top: int = 5,
    batch_size: int = 32,
    look: Look = LOOK,
    attention: bool = False,
) -> Iterator[Prediction]:
    """The likeliest classes of each picture, in order; one that cannot be read has a `problem` instead."""
    if not 1 <= top <= len(classes):
        raise FathomsError(f"--top {top}: use 1 to {len(classes)}, the number of classes")
    decoder = choose_decoder()
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (look.mean, look.std))
    home = next(model.parameters())
    cubic = look.interpolation == "bicubic"
    for start in range(0, len(files), batch_size):
        seen: dict[Path, Tensor] = {}
        problems: dict[Path, str] = {}
        for file in files[start : start + batch_size]:
            try:
                decoded = decoder.decode(read_plain(file, MAX_FILE))
                pixels = evaluation_pixels(decoded, model.config.image_size, look.photo_crop, cubic)
                seen[file] = _grey(pixels.float() / 255, model.config.in_channels)
            except (BadImageError, OSError) as error:
                problems[file] = " ".join(str(error).split())
        rows: dict[Path, Prediction] = {}
        if seen:
            images = (torch.stack(list(seen.values())) - shift) / scale
            images = images[:, : model.config.in_channels].to(home.device, home.dtype)
            with in_inference(model):
                values, indices = model(images).float().softmax(-1).topk(top)
            maps = attention_maps(model, images).float().cpu() if attention else [None] * len(images)
            for file, value, index, drawn in zip(seen, values.tolist(), indices.tolist(), maps, strict=True):
                names = tuple(classes[i] for i in index)
                kept = seen[file] if attention else None
                rows[file] = Prediction(str(file), names, tuple(value), "", drawn, kept)
        for file in files[start : start + batch_size]:
            yield rows.get(file) or Prediction(str(file), problem=problems[file])


def _grey(pixels: Tensor, channels: int) -> Tensor:
    """A picture without colours for a model of one channel, which is trained on the first of three equal ones."""
    return pixels.mean(0, keepdim=True).expand(3, -1, -1) if channels == 1 else pixels


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
