"""Classify image files: the likeliest classes with their probabilities, attention maps, examples for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from fathoms.data import LoaderOptions
from fathoms.data.images.decode import Decoder, choose_decoder
from fathoms.data.images.pixels import evaluation_geometry
from fathoms.data.images.transforms import ImageTransform
from fathoms.data.sources.source import IMAGE_SUFFIXES, MAX_FILE, BadImageError, is_image
from fathoms.data.sources.splits import subset
from fathoms.errors import FathomsError, WeightsError, reason
from fathoms.evaluating.preprocessing import AnyLoader, Preprocessing, eval_loader
from fathoms.parts.modes import in_inference
from fathoms.plotting.style import save_figure
from fathoms.probes.attention_maps import attention_maps
from fathoms.probes.probe_figures import overlay_figure
from fathoms.surgery.inputs import image_shape
from fathoms.untrusted import read_names, read_plain

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
        logits = model(images).float()
        if not logits.isfinite().all():
            raise WeightsError(
                "predict: the model gives values that are not finite; its weights are lost, load others"
            )
        values, indices = logits.softmax(-1).topk(top)
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
    """Write the image with its likeliest class beside its attention map, with a scale."""
    assert prediction.attention is not None
    assert prediction.pixels is not None
    caption = f"{prediction.classes[0][:40]} {prediction.probabilities[0]:.1%}"
    pixels = prediction.pixels.clamp(0, 1).permute(1, 2, 0).numpy()
    save_figure(overlay_figure(pixels, prediction.attention.numpy(), caption), path)


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
            pixels = _as_bytes(batch.images, preprocessing)
            rows = (batch.ids, batch.labels, chances, classes)
            for place, (index, label, chance, kinds) in enumerate(
                zip(*(row.tolist() for row in rows), strict=True)
            ):
                if label >= 0:
                    top = [[one, round(p, 4)] for one, p in zip(kinds, chance, strict=True)]
                    png = _png(pixels[place])
                    shown.append({"name": part.where(index), "label": label, "top": top, "png": png})
    return shown


def _as_bytes(images: Tensor, preprocessing: Preprocessing) -> Tensor:
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
