"""Classify pictures: the likeliest classes of each, as a table or as JSON.

Exit status: 0 every picture was read, 1 some could not be (they are named), 2 it could not run.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from fathoms.errors import FathomsError, printable

if TYPE_CHECKING:
    from fathoms.models.config import ViTConfig

EXAMPLES = """
fathoms predict cat.jpg --checkpoint weights.safetensors --model cait_xxs24_224
fathoms predict photos/ --checkpoint weights.safetensors --model cait_xxs24_224 --classes names.txt --top 3 --json
fathoms predict photos/ --checkpoint out.safetensors --card out.safetensors.json --attention looked/
"""


@dataclass(frozen=True)
class Args:
    """What to look at, and with what."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Pictures, or folders of them."""
    checkpoint: Path
    """A weights file (.safetensors)."""
    model: str = ""
    """The model they belong to: a name from `fathoms models`, with its own image size and 1000 classes."""
    card: Path | None = None
    """Instead of --model: the JSON card that `fathoms export` wrote beside the weights."""
    classes: Path | None = None
    """Names of the classes, one a line; without it classes are numbers."""
    top: int = 5
    """How many classes of each picture."""
    batch_size: int = 32
    """Pictures at a time."""
    crop_pct: float = 0.9
    """Which part of the resized picture is kept."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of the channels in training."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Deviation of the channels in training."""
    attention: Path | None = None
    """Folder for pictures of where the model looked."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Classify every picture; 1 if some could not be read."""
    from fathoms.cli.data_check import progress_bar
    from fathoms.export.predict import list_pictures, overlay, predict, read_classes
    from fathoms.models.header import build_for
    from fathoms.models.weights import load_weights

    files = list_pictures(args.images)
    model = build_for(_config(args), args.checkpoint)
    load_weights(model, args.checkpoint)
    classes = read_classes(args.classes, model.config.num_classes)
    look = {"top": min(args.top, len(classes)), "batch_size": args.batch_size, "crop_pct": args.crop_pct}
    look |= {"mean": args.mean, "std": args.std, "attention": args.attention is not None}
    if args.attention is not None:
        args.attention.mkdir(parents=True, exist_ok=True)
    rows = []
    with progress_bar("predicting", len(files)) as advance:
        for number, row in enumerate(predict(model, files, classes=classes, **look)):  # pyrefly: ignore
            if args.attention is not None and not row.problem:
                overlay(row, args.attention / f"{number:06d}-{Path(row.file).stem}.png")
            rows.append(row)
            advance(number + 1)
    bad = [row for row in rows if row.problem]
    if args.json:
        told = [
            {
                "file": row.file,
                "classes": row.classes,
                "probabilities": row.probabilities,
                "problem": row.problem,
            }
            for row in rows
        ]
        print(json_format.dumps({"predictions": told, "bad": len(bad)}))
        return 1 if bad else 0
    for row in rows:
        answer = ", ".join(
            f"{n} {100 * p:.1f} %" for n, p in zip(row.classes, row.probabilities, strict=True)
        )
        print(printable(f"{row.file}: {answer if not row.problem else 'NOT READ: ' + row.problem}"))
    return 1 if bad else 0


def _config(args: Args) -> ViTConfig:
    """The config of the named model, or the one on the card."""
    from fathoms.models.config import ViTConfig
    from fathoms.models.zoo import model_config
    from fathoms.reading import MAX_TOML, read_json

    if bool(args.model) == (args.card is not None):
        raise FathomsError("give one of --model and --card")
    if args.card is None:
        return model_config(args.model)
    fields = read_json(args.card, FathomsError, MAX_TOML).get("config")
    if not isinstance(fields, dict):
        raise FathomsError(f"{args.card}: no card of an exported model; it has no config")
    return ViTConfig().replace(**fields)
