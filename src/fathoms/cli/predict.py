"""Classify images: the likeliest classes of each, as a table or as JSON.

Exit status: 0 all images were read, 1 some could not be read (they are listed), 2 the command could not run.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from fathoms.cli.flags.early_checks import (
    check_counts,
    check_data,
    check_folder,
    check_trained,
    without_switches,
)
from fathoms.cli.targets import prepared_as, say_taken
from fathoms.errors import FathomsError, printable
from fathoms.files import check_absent

if TYPE_CHECKING:
    from fathoms.evaluating.load import LoadedModel
    from fathoms.evaluating.predict import Prediction
    from fathoms.evaluating.preprocessing import Preprocessing

EXAMPLES = """
fathoms predict cat.jpg --checkpoint runs/NAME
fathoms predict photos/ --checkpoint runs/NAME --top 3 --attention maps/
fathoms predict photos/ --checkpoint weights.safetensors --model cait_xxs24_224 --classes names.txt --json
fathoms predict photos/ --checkpoint hf-hub:OWNER/NAME
"""


@dataclass(frozen=True)
class Args:
    """Images and model."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Images, or folders of images."""
    checkpoint: str
    """A run folder, a checkpoint folder, a weights file (.safetensors, .pth, .pth.tar), an .onnx file, or
    hf-hub:OWNER/NAME[@REVISION]. Of a run folder it is checkpoints/best, else checkpoints/last."""
    model: str | None = None
    """Name of the model, timm/NAME for a timm model; default: the recorded one, which a name must not contradict."""
    classes: Path | None = None
    """File of class names, one per line; default: those of the run or the card, else their numbers."""
    top: int = 5
    """Number of classes to list for each image; all where there are fewer."""
    batch_size: int = 32
    """Images per batch."""
    device: str = "auto"
    """auto, cpu or cuda."""
    image_size: int | None = None
    """Image size other than the model's; position embeddings are resized."""
    mean: tuple[float, float, float] | None = None
    """Mean of each channel, from 0 to 1; default: as recorded, else as the model's name has it."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of each channel; default: likewise."""
    crop_pct: float | None = None
    """Share of each side that the centre crop keeps; default: likewise."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Filter of the resize; default: likewise."""
    attention: Path | None = None
    """Folder for attention maps, drawn over the images; fathoms models only."""
    overwrite: bool = False
    """Replace attention maps that are there already."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    checkpoint = _checked(args)
    from fathoms.evaluating.load import load_run
    from fathoms.evaluating.predict import class_names, list_images

    files = list_images(args.images)
    size: dict[str, Any] = {} if args.image_size is None else {"image_size": args.image_size}
    with without_switches():
        loaded = load_run(checkpoint, args.model, **size)
    preprocessing = prepared_as(args, loaded)
    classes = class_names(args.classes, loaded.classes, loaded.num_classes)
    _make_map_folder(args, loaded, files)
    rows = _predicted(args, loaded, files, classes, preprocessing)
    say_taken(args, loaded, preprocessing)
    bad = sum(bool(row.problem) for row in rows)
    if args.json:
        found = [row.to_json() for row in rows]
        print(json_format.dumps({"weights": loaded.source, "predictions": found, "bad": bad}))
    else:
        print(table(rows))
    return 1 if bad else 0


def _checked(args: Args) -> str:
    """The checkpoint, after a look at every flag that needs no torch."""
    check_counts(args, ("top", "batch_size"))
    for image in args.images:
        check_data(image)
    check_data(args.classes, "--classes")
    if args.attention is not None:
        check_folder("--attention", args.attention)
    return check_trained(args.checkpoint, args.model, args.device)


def _make_map_folder(args: Args, loaded: LoadedModel, files: list[Path]) -> None:
    """Make the folder of --attention, if it is given; maps that are there already are an error."""
    if args.attention is None:
        return
    if loaded.config is None:
        kind = "timm's models" if loaded.name.startswith("timm/") else "exported files"
        raise FathomsError(
            f"--attention: {kind} show none; give a fathoms model as a run, checkpoint or weights file"
        )
    check_absent([map_file(args.attention, *entry) for entry in enumerate(files)], args.overwrite)
    args.attention.mkdir(parents=True, exist_ok=True)


def _predicted(
    args: Args, loaded: LoadedModel, files: list[Path], classes: Sequence[str], preprocessing: Preprocessing
) -> list[Prediction]:
    """The classes of each image, with a bar; attention maps are written as they come."""
    from fathoms.cli.terminal.live_output import progress_bar
    from fathoms.evaluating.predict import overlay, predict
    from fathoms.training.distributed import choose_device

    rows: list[Prediction] = []
    predictions = predict(
        loaded.model.to(choose_device(args.device)),
        files,
        classes=classes,
        preprocessing=preprocessing,
        top=min(args.top, len(classes)),
        batch_size=args.batch_size,
        attention=args.attention is not None,
    )
    with progress_bar("predicting", len(files)) as advance:
        for number, row in enumerate(predictions):
            if args.attention is not None and not row.problem:
                overlay(row, map_file(args.attention, number, Path(row.file)))
            rows.append(row)
            advance(number + 1)
    return rows


def map_file(folder: Path, number: int, image: Path) -> Path:
    """The attention map of an image, which is numbered: two images may have one name."""
    return folder / f"{number:06d}-{image.stem}.png"


def table(rows: list[Prediction]) -> str:
    """A line for each image: its classes with their probabilities, or why it could not be read."""
    from fathoms.text_table import aligned

    width = max((len(row.classes) for row in rows), default=0) or 1
    lines = []
    for row in rows:
        cells = [f"{name} {100 * p:.1f} %" for name, p in zip(row.classes, row.probabilities, strict=True)]
        if row.problem:
            cells = [f"NOT READ: {row.problem}"]
        cells = [printable(cell) for cell in cells]
        lines.append((printable(row.file), *cells, *[""] * (width - len(cells))))
    return aligned(("image", *[f"class {place + 1}" for place in range(width)]), lines)
