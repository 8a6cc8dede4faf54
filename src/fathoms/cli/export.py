"""Export a model: ONNX, torch.export, safetensors or timm's parameter names.

The batch size stays dynamic. The file is run at batch sizes 1 and 5 and compared with the original; one that
differs is not kept. A card is written next to it: config, recipe, metrics, preprocessing, class names.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from fathoms.cli.flags.early_checks import check_data, check_trained, named_data
from fathoms.cli.flags.parse import Switches, given
from fathoms.cli.targets import prepared_as, say_taken
from fathoms.errors import FathomsError, flag_of, printable
from fathoms.files import check_absent

if TYPE_CHECKING:
    from fathoms.evaluating.load import LoadedModel
    from fathoms.exporting.export import Exported, Judge

EXAMPLES = """
fathoms export runs/NAME --fold --output model.onnx
fathoms export runs/NAME --int8 photos/
fathoms export weights.safetensors --model cait_xxs24_224 --format torch-export --json
fathoms export checkpoint.pth --model timm/cait_xxs24_224 --accelerate --fold
fathoms export runs/NAME --format safetensors --push OWNER/NAME
"""


@dataclass(frozen=True)
class Args:
    """Model and format."""

    checkpoint: tyro.conf.Positional[str]
    """A run folder, a checkpoint folder, a weights file (.safetensors, .pth, .pth.tar), or
    hf-hub:OWNER/NAME[@REVISION]. Of a run folder it is checkpoints/best, else checkpoints/last."""
    model: str | None = None
    """Name of the model, timm/NAME for a timm model; default: the recorded one, which a name must not contradict."""
    format: Literal["onnx", "torch-export", "safetensors", "timm"] = "onnx"
    """Format of the file; timm: safetensors with timm's parameter names."""
    output: Path | None = None
    """File to write; default: model.onnx (model.int8.onnx with --int8), .pt2 or .safetensors in the run folder or
    next to the weights."""
    overwrite: bool = False
    """Replace a file, and its card, that is there already."""
    mean: tuple[float, float, float] | None = None
    """Mean of each channel, from 0 to 1, for the card; default: as recorded, else as the model's name has it."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of each channel; default: likewise."""
    crop_pct: float | None = None
    """Share of each side that the centre crop keeps; default: likewise."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Filter of the resize; default: likewise."""
    accelerate: bool = False
    """Replace talking heads and class attention of timm's and DeiT's models by faster forms first."""
    fold: bool = False
    """Fold scales and shifts into the matrices first."""
    opset: int | None = None
    """ONNX opset; default 18."""
    int8: str | None = None
    """Quantise the matrices of an ONNX file to int8, and report the accuracy on this data before and after."""
    max_drop: float | None = None
    """Largest loss of top-1 accuracy that --int8 may cost, in percentage points; default 1."""
    push: str | None = None
    """Upload it with its card to this Hub repository, OWNER/NAME."""
    visibility: Literal["private", "public"] | None = None
    """Visibility of a repository that --push creates; default private."""
    json: bool = False
    """Print one JSON object."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    """Load, export, push if requested, and print the result."""
    for name, needed in {"max_drop": "int8", "visibility": "push"}.items():
        if getattr(args, name) is not None and getattr(args, needed) is None:
            raise FathomsError(f"{flag_of(name)} needs {flag_of(needed)}; give both or neither")
    if args.max_drop is not None and not 0 <= args.max_drop <= 100:
        raise FathomsError(f"--max-drop {args.max_drop}: use 0 to 100 percentage points")
    check_data(args.int8, "--int8")
    checkpoint = check_trained(args.checkpoint, args.model, where="CHECKPOINT")
    from fathoms.evaluating.onnx_model import file_of_card
    from fathoms.exporting.card import card_entries, card_files
    from fathoms.exporting.export import FORMATS, export_model, publish

    loaded = load(args, checkpoint)
    ending = f".int8{FORMATS[args.format]}" if args.int8 is not None else FORMATS[args.format]
    target = args.output or default_output(file_of_card(args.checkpoint), loaded, ending)
    if target.resolve() == Path(loaded.source).resolve():
        raise FathomsError(f"{target}: this would overwrite the checkpoint; give another --output")
    check_absent((target, *card_files(target)), args.overwrite)
    exported = export_model(
        loaded.model,
        target,
        args.format,
        accelerated=args.accelerate,
        folded=args.fold,
        opset=args.opset,
        int8=None if args.int8 is None else judge(args, loaded),
        name=loaded.name,
        about=card_entries(loaded),
    )
    say_taken(args, loaded, loaded.preprocessing)
    pushed = None
    if args.push is not None:
        pushed = publish(exported, args.push, public=args.visibility == "public")
    if args.json:
        named = {"model": loaded.name, "weights": loaded.source}
        print(json_format.dumps({**named, **exported.to_json(), "pushed": pushed}))
    else:
        print("\n".join(map(printable, lines(exported, pushed))))
    return 0


def load(args: Args, checkpoint: str) -> LoadedModel:
    """The model of a checkpoint, prepared as the flags say."""
    from fathoms.evaluating.load import load_run
    from fathoms.evaluating.onnx_model import exported_file

    if exported_file(checkpoint) is not None:
        raise FathomsError(f"{checkpoint}: is an exported file already; give the run or the weights")
    loaded = load_run(checkpoint, args.model, **given(args.switches))
    return replace(loaded, preprocessing=prepared_as(args, loaded))


def default_output(checkpoint: str, loaded: LoadedModel, ending: str) -> Path:
    """Default output file: in its run folder, next to its weights file, or here."""
    path = Path(checkpoint)
    if path.is_file():
        return path.with_suffix(ending)
    if loaded.run is not None:
        return loaded.run / f"model{ending}"
    return Path(f"{Path(checkpoint.partition('@')[0]).name}{ending}")


def judge(args: Args, loaded: LoadedModel) -> Judge:
    """The images on which int8 is measured, preprocessed as in the model's recipe."""
    from fathoms.data import LoaderOptions
    from fathoms.data.sources.splits import open_held_out
    from fathoms.evaluating.preprocessing import eval_loader
    from fathoms.evaluating.results import match_classes
    from fathoms.exporting.export import Judge

    assert args.int8 is not None
    source = open_held_out(named_data(args.int8))
    options = LoaderOptions(grey=loaded.in_channels == 1)
    loader = eval_loader(source, loaded.image_size, 32, loaded.preprocessing, options=options)
    labels = None if loaded.classes is None else match_classes(source.classes, loaded.classes, args.int8)
    drop = {} if args.max_drop is None else {"max_drop": args.max_drop}
    return Judge(args.int8, lambda: loader.epoch(0), len(source.classes), labels, **drop)


def lines(exported: Exported, pushed: str | None) -> list[str]:
    """The result as lines of text."""
    report = []
    if exported.accelerated is not None:
        report.append(f"{exported.accelerated or 'no'} modules accelerated")
    if exported.folded is not None:
        report.append(f"{exported.folded} scales and shifts folded")
    report += [
        f"batch {n}: differs by {gap:.2g} of the largest output" for n, gap in exported.differences.items()
    ]
    if exported.int8 is not None:
        (before, after), (large, small) = exported.int8.top1, exported.int8.bytes
        report.append(
            f"int8: top1 {before:.2f} -> {after:.2f} on {exported.int8.images} images of {exported.int8.data}"
        )
        report.append(f"int8: {large:,} -> {small:,} bytes, {1 - small / large:.0%} saved")
    report.append(f"written to {exported.path}, card in {exported.card}")
    return report if pushed is None else [*report, f"pushed to {pushed}"]
