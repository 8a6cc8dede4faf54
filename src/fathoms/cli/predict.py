"""Classify pictures: the likeliest classes of each, as a table or as JSON.

Exit status: 0 every picture was read, 1 some could not be (they are named), 2 it could not run.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from fathoms.errors import printable

if TYPE_CHECKING:
    from fathoms.evaluate.predict import Prediction

EXAMPLES = """
fathoms predict cat.jpg --checkpoint runs/NAME
fathoms predict photos/ --checkpoint runs/NAME --top 3 --attention looked/
fathoms predict photos/ --checkpoint weights.safetensors --model cait_xxs24_224 --classes names.txt --json
fathoms predict photos/ --checkpoint OWNER/NAME
"""


@dataclass(frozen=True)
class Args:
    """What to look at, and with what."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Pictures, or folders of them."""
    checkpoint: str
    """A run folder, a checkpoint folder, a weights file, or OWNER/NAME[@REVISION] on the Hub."""
    model: str | None = None
    """Name of the model; without it, what the run or the card beside the weights says."""
    classes: Path | None = None
    """Names of the classes, one a line; without it the run's or the card's, or else their numbers."""
    top: int = 5
    """How many classes of each picture; all where there are fewer."""
    batch_size: int = 32
    """Pictures at a time."""
    device: str = "auto"
    """auto, cpu or cuda."""
    crop_pct: float | None = None
    """Share of the picture to keep; without it, the recipe's."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Filter of the resize; without it, the recipe's."""
    mean: tuple[float, float, float] | None = None
    """Mean of the colours in training; without it, the recipe's."""
    std: tuple[float, float, float] | None = None
    """Deviation of the colours in training; without it, the recipe's."""
    attention: Path | None = None
    """Folder for pictures of where the model looked."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Classify every picture; 1 if some could not be read."""
    from fathoms.cli.data_check import progress_bar
    from fathoms.evaluate.load import load_trained
    from fathoms.evaluate.predict import class_names, list_pictures, overlay, predict
    from fathoms.evaluate.preprocessing import Look
    from fathoms.train.distributed import choose_device

    files = list_pictures(args.images)
    trained = load_trained(args.checkpoint, args.model)
    changes = {name: getattr(args, name) for name in ("crop_pct", "interpolation", "mean", "std")}
    look = Look.of(trained.recipe, **changes)
    classes = class_names(args.classes, trained.classes, trained.config.num_classes)
    if args.attention is not None:
        args.attention.mkdir(parents=True, exist_ok=True)
    rows: list[Prediction] = []
    answers = predict(
        trained.model.to(choose_device(args.device)),
        files,
        classes=classes,
        look=look,
        top=min(args.top, len(classes)),
        batch_size=args.batch_size,
        attention=args.attention is not None,
    )
    with progress_bar("predicting", len(files)) as advance:
        for number, row in enumerate(answers):
            if args.attention is not None and not row.problem:
                overlay(row, args.attention / f"{number:06d}-{Path(row.file).stem}.png")
            rows.append(row)
            advance(number + 1)
    bad = sum(bool(row.problem) for row in rows)
    if args.json:
        print(json_format.dumps({"predictions": [row.to_json() for row in rows], "bad": bad}))
    else:
        print(table(rows))
    return 1 if bad else 0


def table(rows: list[Prediction]) -> str:
    """A line for each picture: its classes with their percent, or why it could not be read."""
    from fathoms.text_table import aligned

    width = max((len(row.classes) for row in rows), default=0) or 1
    lines = []
    for row in rows:
        answers = [f"{name} {100 * p:.1f} %" for name, p in zip(row.classes, row.probabilities, strict=True)]
        cells = answers if not row.problem else [f"NOT READ: {row.problem}"]
        cells = [printable(cell) for cell in cells]
        lines.append((printable(row.file), *cells, *[""] * (width - len(cells))))
    return aligned(("picture", *[f"class {place + 1}" for place in range(width)]), lines)
