"""Evaluate a trained model: accuracy, loss, calibration, per-class accuracy, confusion matrix.

DATA is the data set of its training, or another with the same classes. With --robustness, further data sets
(ImageNet-V2, -A, -R, -Sketch) are matched by class names or numbers and evaluated too.
"""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from fathoms.cli.flags.early_checks import (
    check_counts,
    check_data,
    check_trained,
    named_data,
    without_switches,
)
from fathoms.cli.targets import prepared_as, say_taken
from fathoms.errors import ConfigError, printable
from fathoms.files import check_absent

EXAMPLES = """
fathoms validate --checkpoint runs/vit_digits-digits-1a2b3c4d
fathoms validate imagenet/val --model vit_scaler_192x36_16 --checkpoint model.safetensors --amp
fathoms validate photos/ --checkpoint runs/NAME/model.onnx
fathoms validate imagenet/ --checkpoint runs/NAME --robustness imagenetv2/ imagenet-a/ --json
"""


@dataclass(frozen=True)
class Args:
    """Model and data."""

    checkpoint: str
    """A run folder, a checkpoint folder, a weights file (.safetensors, .pth, .pth.tar), an .onnx file, or
    hf-hub:OWNER/NAME[@REVISION]. Of a run folder it is checkpoints/best, else checkpoints/last."""
    data: tyro.conf.Positional[str | None] = None
    """The data set; default: the one the model was trained on."""
    model: str | None = None
    """Name of the model, timm/NAME for a timm model; default: the recorded one, which a name must not contradict."""
    split: str | None = None
    """The split to evaluate; default: test, else val or validation, or all of a folder without splits."""
    batch_size: int = 256
    """Images per batch."""
    device: str = "auto"
    """auto, cpu or cuda."""
    workers: int = 0
    """Number of decoding threads; 0: one per core."""
    max_bad: float = 0.01
    """Share of the images that may be unreadable; they are left out of the metrics, and more end the command."""
    amp: bool = False
    """Mixed precision."""
    amp_dtype: Literal["bfloat16", "float16"] | None = None
    """Autocast dtype of --amp; default bfloat16."""
    torchcompile: str | None = None
    """Compile with this backend of torch, such as inductor."""
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
    use_ema: tyro.conf.FlagConversionOff[bool | None] = None
    """Averaged (EMA) or plain weights; default: a run's averaged ones where it has them, a .pth file's plain ones."""
    robustness: tuple[str, ...] = ()
    """Further data sets to evaluate."""
    real_labels: str | None = None
    """ReaL labels of the validation images: a JSON list of label lists."""
    confusion: str | None = None
    """Write the confusion matrix to this .csv."""
    per_class: str | None = None
    """Write the per-class accuracy to this .csv."""
    results_file: str | None = None
    """Write all metrics to this .json, or a row for each data set to this .csv."""
    overwrite: bool = False
    """Replace result files that are there already."""
    json: bool = False
    """Print one JSON object on the last line."""


def run(args: Args) -> int:
    check_counts(args, ("batch_size",))
    check_counts(args, ("workers",), least=0)
    if args.amp_dtype is not None and not args.amp:
        raise ConfigError("--amp-dtype would not be used: it goes with --amp; add that")
    for place in (args.data, args.real_labels, *args.robustness):
        check_data(place)
    checkpoint = check_trained(args.checkpoint, args.model, args.device)
    from fathoms.evaluating.load import load_run
    from fathoms.evaluating.onnx_model import exported_file
    from fathoms.evaluating.results import check_target, read_real
    from fathoms.training.distributed import join_world, leave_world, naming_lost_ranks

    check_target("--confusion", args.confusion, (".csv",))
    check_target("--per-class", args.per_class, (".csv",))
    check_target("--results-file", args.results_file, (".json", ".csv"))
    files = (args.confusion, args.per_class, args.results_file)
    check_absent([Path(file) for file in files if file is not None], args.overwrite)
    real = None if args.real_labels is None else read_real(args.real_labels)
    size: dict[str, Any] = {} if args.image_size is None else {"image_size": args.image_size}
    if exported_file(checkpoint) is not None:
        refuse_unused(args)
    with without_switches():
        loaded = load_run(checkpoint, args.model, ema=args.use_ema, **size)
    world = join_world(args.device)
    try:
        with naming_lost_ranks(world):
            results = measure_all(args, loaded, world, real)
    finally:
        leave_world()
    if world.is_main:
        say_taken(args, loaded, prepared_as(args, loaded))
        report(args, results, loaded.source)
    return 0


def refuse_unused(args: Args) -> None:
    """Refuse flags that would have no effect on an exported file, which has its own runtime."""
    given = {"--amp": args.amp, "--torchcompile": args.torchcompile, "--use-ema": args.use_ema is not None}
    for flag in (flag for flag, value in given.items() if value):
        raise ConfigError(f"{flag}: {args.checkpoint} runs as it was exported; leave it out")


def measure_all(
    args: Args, loaded: Any, world: Any, real: dict[int, Any] | None
) -> dict[str, dict[str, Any]]:
    """Metrics by data set; all are opened before the first is evaluated."""
    import torch

    from fathoms.data.sources.splits import open_held_out
    from fathoms.evaluating.metrics import FewerChannels
    from fathoms.evaluating.results import class_note, empty_note, guessed_order, match_classes, real_of

    data = named_data(args.data) if args.data is not None else loaded.data
    if data is None:
        raise ConfigError("the checkpoint does not record its data; give DATA")
    if args.data is None:
        check_recorded_data(data, args.checkpoint)
    further = tuple(map(named_data, args.robustness))
    places = (data, *further)
    # The split that a run carved belongs to the run's own data.
    run = loaded.run if args.data is None else None
    sources = {place: open_held_out(place) for place in further}
    sources = {data: open_held_out(data, args.split, run), **sources}
    labels = None if real is None else real_of(sources[data], real, str(args.real_labels))
    loaders = {place: make_loader(args, loaded, source, world) for place, source in sources.items()}
    maps: dict[str, Any] = dict.fromkeys(places)
    notes = [empty_note(sources[data].classes, sources[data].labels.tolist(), data)]
    if loaded.classes is not None:
        maps = {place: match_classes(sources[place].classes, loaded.classes, place) for place in places}
        notes.append(class_note(sources[data].classes, loaded.classes, data))
    else:
        notes.append(guessed_order(args.checkpoint, sources[data].classes))
    if loaded.recipe.get("amp") and not args.amp and loaded.run is not None:
        notes.append(f"{args.checkpoint}: was measured with --amp in training, here without")
    for note in (note for note in notes if note is not None and world.is_main):
        print(printable(note), file=sys.stderr)
    model = loaded.model.to(world.device)
    if args.torchcompile is not None:
        from fathoms.training.compiling import check_backend

        model = torch.compile(model, backend=check_backend(args.torchcompile))
    seen = FewerChannels(model, loaded.in_channels)
    return {
        place: measure(args, seen, loaders[place], maps[place], world, labels if place == data else None)
        for place in places
    }


def check_recorded_data(data: str, checkpoint: str) -> None:
    """Refuse data that the user did not name and that is not there, by where its path comes from."""
    try:
        check_data(data)
    except ConfigError as error:
        seen = "" if Path(data).is_absolute() else f", seen from {Path.cwd()}"
        raise ConfigError(
            f"{data}: {checkpoint} was trained on it, and it is not there{seen}; give DATA"
        ) from error


def make_loader(args: Args, loaded: Any, source: Any, world: Any) -> Any:
    """The images of a data set, preprocessed as in the run except for the flags."""
    from fathoms.data import LoaderOptions
    from fathoms.evaluating.preprocessing import check_crop, eval_loader

    check_crop(args.crop_pct, source)
    return eval_loader(
        source,
        loaded.image_size,
        args.batch_size,
        prepared_as(args, loaded),
        options=LoaderOptions(args.workers, max_bad=args.max_bad, grey=loaded.in_channels == 1),
        device=world.device,
        share=(world.rank, world.size),
    )


def measure(args: Args, model: Any, loader: Any, label_map: Any, world: Any, real: Any) -> dict[str, Any]:
    import torch

    from fathoms.evaluating.metrics import evaluate

    dtype = getattr(torch, args.amp_dtype or "bfloat16") if args.amp else None
    classes = loader.source.classes
    options = {"device": world.device, "amp_dtype": dtype, "label_map": label_map, "real": real}
    result = evaluate(model, loader.epoch(0), len(classes), **options)
    per_class = dict(zip(classes, result.per_class, strict=True))
    extra = {} if real is None else {"real_top1": result.real_top1}
    return {**result.summary(), "per_class": per_class, "confusion": result.confusion, **extra}


def report(args: Args, results: dict[str, dict[str, Any]], weights: str) -> None:
    from fathoms.evaluating import results as files
    from fathoms.evaluating.results import class_table

    if args.confusion is not None:
        files.write_confusion(args.confusion, results)
    if args.per_class is not None:
        files.write_per_class(args.per_class, results)
    if args.results_file is not None:
        files.write_results(args.results_file, results)
    if args.json:
        print(json_format.dumps({"weights": weights, "results": files.written_out(results)}))
        return
    for place, result in results.items():
        print(
            f"{printable(place)}: top1 {result['top1']:.2f}  top5 {result['top5']:.2f}  loss {result['loss']:.4f}  "
            f"calibration error {result['calibration_error']:.2f}  images {result['images']}"
        )
        if result["skipped"]:
            print(f"  {result['skipped']} images could not be read", file=sys.stderr)
        if result.get("real_top1") is not None:
            print(f"  ReaL top1 {result['real_top1']:.2f}")
        table = class_table(result["per_class"], result["confusion"])
        print("\n".join(f"  {line}" for line in table.splitlines()))
