"""Write a model for use elsewhere: ONNX, torch.export, safetensors or timm's names.

The batch stays free. What was written is run at batch 1 and 5 and compared with the original before it gets
its name. A card lies beside it: config, recipe and metrics of its run, how pictures are prepared, class names.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from fathoms.cli.parse import Switches, given
from fathoms.errors import FathomsError, printable

if TYPE_CHECKING:
    from fathoms.evaluate.load import Trained
    from fathoms.export.export import Exported
    from fathoms.export.quantise import Judge

EXAMPLES = """
fathoms export runs/NAME --fold --output model.onnx
fathoms export runs/NAME --int8 photos/
fathoms export weights.safetensors --model cait_xxs24_224 --format torch-export --json
fathoms export runs/NAME --format safetensors --push OWNER/NAME
"""


@dataclass(frozen=True)
class Args:
    """What to export, and as what."""

    checkpoint: tyro.conf.Positional[str]
    """A run folder, a checkpoint folder, a weights file, or OWNER/NAME[@REVISION] on the Hub."""
    model: str | None = None
    """Name of the model; without it, what the run or the card beside the weights says."""
    format: Literal["onnx", "torch-export", "safetensors", "timm"] = "onnx"
    """What to write."""
    output: Path | None = None
    """Where to; without it, into the run folder, or beside the weights, with the ending of the format."""
    fold: bool = False
    """Fold scales and shifts into the matrices first."""
    opset: int | None = None
    """Version of ONNX's operators; without it 18."""
    int8: str | None = None
    """Round ONNX's matrices to eight bits, and show the accuracy before and after on this data."""
    max_drop: float | None = None
    """Points of accuracy that --int8 may cost, else nothing is written; without it 1."""
    push: str | None = None
    """Then upload it with its card to this repository of the Hub, OWNER/NAME."""
    visibility: Literal["private", "public"] | None = None
    """Who sees a repository that --push makes; without it private."""
    json: bool = False
    """Print one JSON object."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    """Load, export, push if asked to, and print what came of it."""
    for name, needed in {"max_drop": "int8", "visibility": "push"}.items():
        if getattr(args, name) is not None and getattr(args, needed) is None:
            raise FathomsError(f"--{name.replace('_', '-')} belongs to --{needed}; give both or neither")
    from fathoms.evaluate.load import load_trained
    from fathoms.export.export import FORMATS, export_model
    from fathoms.export.publish import publish

    trained = load_trained(args.checkpoint, args.model, **given(args.switches))
    target = args.output or default_output(args.checkpoint, trained, FORMATS[args.format])
    if target.resolve() == Path(trained.source).resolve():
        raise FathomsError(f"{target}: this would overwrite the checkpoint; give another --output")
    told = export_model(
        trained.model,
        target,
        args.format,
        folded=args.fold,
        opset=args.opset,
        int8=None if args.int8 is None else judge(args, trained),
        name=trained.name,
        about=about(trained),
    )
    pushed = None
    if args.push is not None:
        pushed = publish(told, args.push, public=args.visibility == "public")
    if args.json:
        print(json_format.dumps({"model": trained.name, **told.to_json(), "pushed": pushed}))
    else:
        print("\n".join(map(printable, lines(told, pushed))))
    return 0


def default_output(checkpoint: str, trained: Trained, ending: str) -> Path:
    """Where an export goes when nobody says: into its run, beside its file, or here."""
    path = Path(checkpoint)
    if path.is_file():
        return path.with_suffix(ending)
    if trained.run is not None:
        return trained.run / f"model{ending}"
    return Path(f"{Path(checkpoint.partition('@')[0]).name}{ending}")


def about(trained: Trained) -> dict[str, object]:
    """What a card says of a model beyond its config."""
    return {
        "weights": trained.source,
        "classes": trained.classes,
        "preprocessing": trained.look.to_dict(),
        "data": trained.data,
        "recipe": trained.recipe,
        "metrics": trained.metrics,
    }


def judge(args: Args, trained: Trained) -> Judge:
    """The pictures on which int8 is measured, prepared as the model's recipe says."""
    from fathoms.data.sources.splits import open_held_out
    from fathoms.evaluate.loader import eval_loader
    from fathoms.evaluate.robustness import match_classes
    from fathoms.export.quantise import Judge

    assert args.int8 is not None
    source = open_held_out(args.int8)
    loader = eval_loader(source, trained.config.image_size, 32, **trained.look.to_dict())
    labels = None if trained.classes is None else match_classes(source.classes, trained.classes, args.int8)
    drop = {} if args.max_drop is None else {"max_drop": args.max_drop}
    return Judge(args.int8, lambda: loader.epoch(0), len(source.classes), labels, **drop)


def lines(told: Exported, pushed: str | None) -> list[str]:
    """What happened, for people."""
    said = [] if told.folded is None else [f"{told.folded} scales and shifts folded"]
    said += [f"batch {n}: differs by {gap:.2g} of the largest output" for n, gap in told.differences.items()]
    if told.int8 is not None:
        (before, after), (large, small) = told.int8.top1, told.int8.bytes
        said.append(
            f"int8: top1 {before:.2f} -> {after:.2f} on {told.int8.images} pictures of {told.int8.data}"
        )
        said.append(f"int8: {large:,} -> {small:,} bytes, {1 - small / large:.0%} saved")
    said.append(f"written to {told.path}, card in {told.card}")
    return said if pushed is None else [*said, f"pushed to {pushed}"]
