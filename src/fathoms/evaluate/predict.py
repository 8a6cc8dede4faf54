"""Classify image files: the likeliest classes with their probabilities, and attention maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from fathoms.data.crop.image_transform import ImageTransform
from fathoms.data.crop.random_crop import evaluation_geometry
from fathoms.data.decode.decode import Decoder, choose_decoder
from fathoms.data.errors import BadImageError
from fathoms.data.sources.base import MAX_FILE, is_image
from fathoms.data.sources.image_formats import IMAGE_SUFFIXES
from fathoms.errors import FathomsError, reason
from fathoms.evaluate.preprocessing import Preprocessing
from fathoms.files.untrusted import read_names, read_plain
from fathoms.models.inference_mode import in_inference
from fathoms.probes.attention_image import draw_attention
from fathoms.probes.attention_maps import attention_maps
from fathoms.surgery.inputs import image_shape

DEFAULT = Preprocessing()
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class Prediction:
    """The predicted classes of one image.

    Args:
        file: The image file.
        classes: Names or numbers of the likeliest classes, the likeliest first.
        probabilities: Their probabilities.
        problem: Why the image could not be read; "" if it was.
        attention: Share of the attention on each patch, (grid, grid); None if not requested.
        pixels: The model's input before normalisation; kept only with `attention`.
    """

    file: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    problem: str = ""
    attention: Tensor | None = None
    pixels: Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as plain data, without the tensors."""
        return {name: getattr(self, name) for name in ("file", "classes", "probabilities", "problem")}


def list_images(paths: Iterable[Path]) -> list[Path]:
    """The given files, and all images below the given folders; an empty list is an error."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if is_image(p.name))
        elif path.is_file():
            found.append(path)
        else:
            raise FathomsError(f"{path}: no such file or folder; give images or folders of them")
    if not found:
        raise FathomsError(f"no image ({', '.join(IMAGE_SUFFIXES)}) was found; give files or folders of them")
    return found


def class_names(path: Path | None, known: Sequence[str] | None, number: int) -> Sequence[str]:
    """Names of the classes: from a file with one per line, else the known names, else their numbers."""
    if path is None and known is None:
        return [str(index) for index in range(number)]
    names = read_names(path) if path is not None else known or ()
    if len(names) != number:
        raise FathomsError(f"{path or 'classes'}: {len(names)} names for {number} classes; give one per line")
    return names


@torch.no_grad()
def predict(
    model: nn.Module,
    files: list[Path],
    *,
    classes: Sequence[str],
    top: int = 5,
    batch_size: int = 32,
    preprocessing: Preprocessing | ImageTransform = DEFAULT,
    attention: bool = False,
) -> Iterator[Prediction]:
    """The likeliest classes of each image, in order; one that cannot be read has a `problem` instead.

    `preprocessing` may be an `ImageTransform` around a transform of torchvision or of your own, for three channels.
    """
    if not 1 <= top <= len(classes):
        raise FathomsError(f"--top {top}: use 1 to {len(classes)}, the number of classes")
    channels, size, _ = image_shape(model)
    decoder = choose_decoder(grey=channels == 1)
    own = isinstance(preprocessing, ImageTransform)
    if own and (attention or (channels, size) != (3, preprocessing.size)):
        raise FathomsError(
            f"preprocessing: a transform of your own needs size={size}, three channels and attention=False here"
        )
    normal = DEFAULT.changed(mean=(0.0,) * 3, std=(1.0,) * 3) if own else preprocessing
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (normal.mean, normal.std))
    home = next(model.parameters(), torch.empty(0))
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        seen, problems = _read(batch, decoder, size, preprocessing)
        rows: dict[Path, Prediction] = {}
        if seen:
            images = (torch.stack(list(seen.values())) - shift) / scale
            images = images[:, :channels].to(home.device, home.dtype)
            rows = _classified(model, seen, images, classes, top, attention)
        for file in batch:
            yield rows.get(file) or Prediction(str(file), problem=problems[file])


def _read(
    files: list[Path], decoder: Decoder, size: int, preprocessing: Preprocessing | ImageTransform
) -> tuple[dict[Path, Tensor], dict[Path, str]]:
    """The pixels of each file, and why others cannot be read."""
    seen: dict[Path, Tensor] = {}
    problems: dict[Path, str] = {}
    for file in files:
        try:
            decoded = decoder.decode(read_plain(file, MAX_FILE))
            seen[file] = _pixels(decoded, size, preprocessing)
        except (BadImageError, OSError) as error:
            problems[file] = reason(error)
    return seen, problems


def _classified(
    model: nn.Module,
    seen: dict[Path, Tensor],
    images: Float[Tensor, "B C H W"],
    classes: Sequence[str],
    top: int,
    attention: bool,
) -> dict[Path, Prediction]:
    """The prediction of each file, from its pixels as the model takes them."""
    with in_inference(model):
        values, indices = model(images).float().softmax(-1).topk(top)
    maps = attention_maps(model, images).float().cpu() if attention else [None] * len(images)
    rows = {}
    for file, value, index, drawn in zip(seen, values.tolist(), indices.tolist(), maps, strict=True):
        names = tuple(classes[i] for i in index)
        rows[file] = Prediction(str(file), names, tuple(value), "", drawn, seen[file] if attention else None)
    return rows


def prepared(
    decoded: UInt8[np.ndarray, "h w 3"], size: int, preprocessing: Preprocessing
) -> UInt8[Tensor, "3 size size"]:
    """The pixels of an image, resized and cut to the centre.

    With Pillow, so that whoever follows the card of an export has the same bits; the loader's own resize, which
    `validate` uses, is faster and differs by rounding.
    """
    rows, columns, _ = decoded.shape
    height, width, top, left = evaluation_geometry(rows, columns, size, preprocessing.crop(size))
    image = Image.fromarray(np.ascontiguousarray(decoded)).resize(
        (width, height), _FILTERS[preprocessing.interpolation]
    )
    # A crop beyond the image, for a crop_pct above 1, is black there.
    cut = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1)


def _pixels(
    decoded: UInt8[np.ndarray, "h w 3"], size: int, preprocessing: Preprocessing | ImageTransform
) -> Tensor:
    """The pixels of an image before normalisation; those of a transform of the user's own are final."""
    if isinstance(preprocessing, ImageTransform):
        return preprocessing.pixels(Image.fromarray(np.ascontiguousarray(decoded)))
    return prepared(decoded, size, preprocessing).float() / 255


def overlay(prediction: Prediction, path: Path) -> None:
    """Write the image beside its attention map, with a scale."""
    assert prediction.attention is not None
    assert prediction.pixels is not None
    draw_attention(prediction.pixels, prediction.attention).save(path)
