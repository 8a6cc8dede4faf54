"""Export a model: ONNX, OpenVINO, torch.export, safetensors or timm's parameter names; or the quickest of them here.

The batch size stays dynamic. The file is run at batch sizes 1 and 5 and compared with the original; one that
differs is not kept. A card is written next to it: config, recipe, metrics, preprocessing, class names.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from fathoms.cli.flags.early_checks import check_data, check_trained, named_data
from fathoms.cli.flags.parse import Switches, given
from fathoms.cli.targets import prepared_as, say_taken, training_split
from fathoms.errors import FathomsError, flag_of, printable
from fathoms.files import check_absent

if TYPE_CHECKING:
    from fathoms.evaluating.load import LoadedModel
    from fathoms.exporting.int8 import Judge
    from fathoms.exporting.verified_export import Exported

EXAMPLES = """
fathoms export runs/NAME --fold --output model.onnx
fathoms export runs/NAME --int8 photos/
fathoms export runs/NAME --fastest photos/ --calibrate photos/
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
    format: Literal["onnx", "openvino", "torch-export", "safetensors", "timm"] = "onnx"
    """Format of the file; openvino: .xml with its weights in .bin; timm: safetensors with timm's parameter names, and
    config.json, by which timm.create_model("local-dir:FOLDER", pretrained=True) loads it."""
    fastest: str | None = None
    """Write every format, in float32 and int8, folded and not, compare each with the model on the images of this data
    set, time it on this machine, and keep the quickest whose accuracy is within --max-drop."""
    output: Path | None = None
    """File to write; default: model.onnx (model.int8.onnx with --int8), .xml, .pt2 or .safetensors in the run folder or
    next to the weights. With --fastest it is a name without ending; default: model.fastest."""
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
    """Quantise the matrices of an ONNX or OpenVINO file to int8, and report the accuracy on this data before and after.
    Where too much is lost, the patch projection and then single MLP outputs stay float32."""
    calibrate: str | None = None
    """Fix the ranges of int8 activations by 128 training images of this data set; default: measure them at run time."""
    max_drop: float | None = None
    """Largest loss of top-1 accuracy that int8 may cost, in percentage points; default 1."""
    push: str | None = None
    """Upload it with its card to this Hub repository, OWNER/NAME."""
    visibility: Literal["private", "public"] | None = None
    """Visibility of a repository that --push creates; default private."""
    json: bool = False
    """Print one JSON object."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    check(args)
    checkpoint = check_trained(args.checkpoint, args.model, where="CHECKPOINT")
    from fathoms.evaluating.onnx_model import file_of_card
    from fathoms.exporting.card import card_entries
    from fathoms.exporting.fastest import export_fastest, table
    from fathoms.exporting.verified_export import FORMATS, export_model, files_of, publish

    loaded = load(args, checkpoint)
    data = args.int8 if args.fastest is None else args.fastest
    images = None if data is None else judge(args, loaded, data)
    options: dict[str, Any] = {"accelerated": args.accelerate, "opset": args.opset, "name": loaded.name}
    options["about"] = card_entries(loaded)
    ending = FORMATS[args.format] if args.int8 is None else f".int8{FORMATS[args.format]}"
    target = args.output or default_output(
        file_of_card(args.checkpoint), loaded, ".fastest" if args.fastest else ending
    )
    if args.fastest is not None:
        assert images is not None
        found = export_fastest(loaded.model, target, images, args.overwrite, **options)
        exported, plain, shown = found.exported, found.to_json(), table(found.tried).splitlines()
    else:
        if target.resolve() == Path(loaded.source).resolve():
            raise FathomsError(f"{target}: this would overwrite the checkpoint; give another --output")
        check_absent(files_of(target, args.format), args.overwrite)
        exported = export_model(loaded.model, target, args.format, folded=args.fold, int8=images, **options)
        plain, shown = exported.to_json(), list[str]()
    say_taken(args, loaded, loaded.preprocessing)
    pushed = None
    if args.push is not None:
        pushed = publish(exported, args.push, public=args.visibility == "public")
    if args.json:
        named = {"model": loaded.name, "weights": loaded.source}
        print(json_format.dumps({**named, **plain, "pushed": pushed}))
    else:
        print("\n".join(map(printable, [*shown, *lines(exported, pushed)])))
    return 0


def check(args: Args) -> None:
    """Refuse flags that would not be used, values out of range and data that are not there."""
    needs = {"max_drop": ("int8", "fastest"), "calibrate": ("int8", "fastest"), "visibility": ("push",)}
    for name, needed in needs.items():
        if getattr(args, name) is not None and all(getattr(args, other) is None for other in needed):
            raise FathomsError(
                f"{flag_of(name)} needs {' or '.join(map(flag_of, needed))}; give both or neither"
            )
    if args.max_drop is not None and not 0 <= args.max_drop <= 100:
        raise FathomsError(f"--max-drop {args.max_drop}: use 0 to 100 percentage points")
    tries = {
        "--int8": args.int8 is not None,
        "--fold": args.fold,
        f"--format {args.format}": args.format != "onnx",
    }
    for flag in (flag for flag, used in tries.items() if used and args.fastest is not None):
        raise FathomsError(
            f"{flag} would not be used: --fastest tries with and without; leave one of the two out"
        )
    for name in ("int8", "fastest", "calibrate"):
        check_data(getattr(args, name), flag_of(name))


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


def judge(args: Args, loaded: LoadedModel, data: str) -> Judge:
    """The images on which files are measured and int8 is calibrated, preprocessed as in the model's recipe."""
    import numpy as np

    from fathoms.data import LoaderOptions
    from fathoms.data.sources.splits import open_held_out, subset
    from fathoms.evaluating.preprocessing import eval_loader
    from fathoms.evaluating.results import match_classes
    from fathoms.exporting.int8 import CALIBRATION, Judge

    options = LoaderOptions(grey=loaded.in_channels == 1)
    shape = (loaded.image_size, 32, loaded.preprocessing)
    source = open_held_out(named_data(data))
    loader = eval_loader(source, *shape, options=options)
    labels = None if loaded.classes is None else match_classes(source.classes, loaded.classes, data)
    more: dict[str, Any] = {} if args.max_drop is None else {"max_drop": args.max_drop}
    if args.calibrate is not None:
        train = training_split(named_data(args.calibrate))
        some = np.unique(
            np.linspace(0, len(train) - 1, min(CALIBRATION, len(train))).round().astype(np.int64)
        )
        examples = eval_loader(subset(train, some, "train"), *shape, options=options)
        more["calibration"] = lambda: examples.epoch(0)
    return Judge(data, lambda: loader.epoch(0), len(source.classes), labels, **more)


def lines(exported: Exported, pushed: str | None) -> list[str]:
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
        report += [f"int8: {sentence}" for sentence in exported.int8.kept]
    report += [*exported.notes, f"written to {exported.path}, card in {exported.card}"]
    return report if pushed is None else [*report, f"pushed to {pushed}"]
