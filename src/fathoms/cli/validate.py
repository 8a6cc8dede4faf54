"""Measure a trained model: accuracy, loss, calibration, each class, confusions.

DATA is what the model was trained on, or another set with the same classes. With --robustness, every further
folder (ImageNet-V2, -A, -R, -Sketch) is matched by class names or numbers and measured too.
"""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from fathoms.errors import ConfigError, printable

EXAMPLES = """
fathoms validate --checkpoint runs/vit_digits-digits-1a2b3c4d
fathoms validate imagenet/val --model vit_scaler_192x36_16 --checkpoint model.safetensors --amp
fathoms validate imagenet/ --checkpoint runs/NAME --robustness imagenetv2/ imagenet-a/ --json
"""


@dataclass(frozen=True)
class Args:
    """What to measure, on what."""

    checkpoint: str
    """A run folder, a checkpoint folder or a weights file."""
    data: tyro.conf.Positional[str | None] = None
    """Where the data is; without it, what the run was trained on."""
    model: str | None = None
    """Name of the model; without it, the run's."""
    split: str | None = None
    """The split to measure; without it, val, validation or test, or all of a folder without splits."""
    batch_size: int = 256
    """Images at a time."""
    device: str = "auto"
    """auto, cpu or cuda."""
    workers: int = 0
    """Decoding threads; 0: one per core."""
    amp: bool = False
    """Mixed precision."""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The low precision of --amp."""
    torchcompile: str | None = None
    """Compile with this backend of torch, such as inductor."""
    image_size: int | None = None
    """Another image size than the model's; positions are resized."""
    crop_pct: float | None = None
    """Share of the picture to keep; without it, the run's."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Filter of the resize; without it, the run's."""
    use_ema: bool = True
    """Take the averaged weights where there are any."""
    robustness: tuple[str, ...] = ()
    """Further data sets to measure."""
    real_labels: str | None = None
    """ReaL's file of label lists for the validation pictures."""
    confusion: str | None = None
    """Write the table of confusions to this .csv."""
    per_class: str | None = None
    """Write each class's accuracy to this .csv."""
    results_file: str | None = None
    """Write all numbers to this .json, or a row for each data set to this .csv."""
    json: bool = False
    """Print one JSON object on the last line."""


def run(args: Args) -> int:
    """Measure, and print."""
    from fathoms.evaluate.load_run import load_run
    from fathoms.evaluate.result_files import check_target
    from fathoms.evaluate.robustness import read_real
    from fathoms.train.distributed import join_world, leave_world, naming_lost_ranks

    check_target("--confusion", args.confusion, (".csv",))
    check_target("--per-class", args.per_class, (".csv",))
    check_target("--results-file", args.results_file, (".json", ".csv"))
    real = None if args.real_labels is None else read_real(args.real_labels)
    size = {} if args.image_size is None else {"image_size": args.image_size}
    trained = load_run(args.checkpoint, args.model, ema=args.use_ema, **size)
    world = join_world(args.device)
    try:
        with naming_lost_ranks(world):
            results = measure_all(args, trained, world, real)
    finally:
        leave_world()
    if world.is_main:
        report(args, results)
    return 0


def measure_all(
    args: Args, trained: Any, world: Any, real: dict[int, Any] | None
) -> dict[str, dict[str, Any]]:
    """Every data set's numbers by path; all sets are opened before the first is measured."""
    import torch

    from fathoms.data.sources.splits import open_held_out
    from fathoms.evaluate.metrics import FewerChannels
    from fathoms.evaluate.robustness import match_classes

    data = args.data if args.data is not None else trained.data
    if data is None:
        raise ConfigError("which data? the checkpoint does not say; give DATA")
    places = (data, *args.robustness)
    sources = {place: open_held_out(place, args.split if place == data else None) for place in places}
    loaders = {place: make_loader(args, trained, source, world) for place, source in sources.items()}
    maps: dict[str, Any] = dict.fromkeys(places)
    if trained.classes is not None:
        maps = {place: match_classes(sources[place].classes, trained.classes, place) for place in places}
    model = trained.model.to(world.device)
    if args.torchcompile is not None:
        model = torch.compile(model, backend=args.torchcompile)
    seen = FewerChannels(model, trained.in_channels)
    results = {}
    for place in places:
        results[place] = measure(args, seen, loaders[place], maps[place], world)
        if real is not None and place == data:
            results[place]["real_top1"] = real_accuracy(args, seen, loaders[place], real, world)
    return results


def make_loader(args: Args, trained: Any, source: Any, world: Any) -> Any:
    """The pictures of a set as the run evaluated its own, but for what the flags say."""
    from fathoms.evaluate.loader import eval_loader
    from fathoms.evaluate.preprocessing import Look

    look = Look.of(trained.recipe, crop_pct=args.crop_pct, interpolation=args.interpolation)
    return eval_loader(
        source,
        trained.image_size,
        args.batch_size,
        crop_pct=look.crop_pct,
        interpolation=look.interpolation,
        mean=look.mean,
        std=look.std,
        workers=args.workers,
        device=world.device,
        share=(world.rank, world.size),
    )


def measure(args: Args, model: Any, loader: Any, label_map: Any, world: Any) -> dict[str, Any]:
    """One data set's numbers."""
    import torch

    from fathoms.evaluate.metrics import evaluate

    dtype = getattr(torch, args.amp_dtype) if args.amp else None
    classes = loader.source.classes
    options = {"device": world.device, "amp_dtype": dtype, "label_map": label_map}
    told = evaluate(model, loader.epoch(0), len(classes), **options)
    per_class = dict(zip(classes, told.per_class, strict=True))
    return {**told.summary(), "per_class": per_class, "confusion": told.confusion}


def real_accuracy(args: Args, model: Any, loader: Any, labels: dict[int, Any], world: Any) -> float:
    """Percent of pictures whose answer is among ReaL's labels; pictures without labels do not count."""
    import torch

    from fathoms.evaluate.robustness import picture_number
    from fathoms.models.inference_mode import in_inference
    from fathoms.train.distributed import sum_over_ranks

    dtype = getattr(torch, args.amp_dtype) if args.amp else None
    right = counted = 0
    with torch.no_grad(), in_inference(model):
        for batch in loader.epoch(0):
            with torch.autocast(world.device.type, dtype=dtype, enabled=dtype is not None):
                answers = model(batch.images).argmax(dim=1).tolist()
            for index, answer in zip(batch.ids.tolist(), answers, strict=True):
                allowed = labels.get(picture_number(loader.source.where(index)))
                if allowed is not None:
                    counted += 1
                    right += answer in allowed
    sums = sum_over_ranks(world, torch.tensor([right, counted], dtype=torch.float64, device=world.device))
    right, counted = (int(value) for value in sums.tolist())
    if not counted:
        raise ConfigError(f"{args.real_labels}: has labels for none of the pictures")
    return 100 * right / counted


def report(args: Args, results: dict[str, dict[str, Any]]) -> None:
    """Print the numbers, and write them where that was asked for."""
    from fathoms.evaluate import result_files as tables

    if args.confusion is not None:
        tables.write_confusion(args.confusion, results)
    if args.per_class is not None:
        tables.write_per_class(args.per_class, results)
    if args.results_file is not None:
        tables.write_results(args.results_file, results)
    if args.json:
        print(json_format.dumps({"results": results}))
        return
    for place, told in results.items():
        print(
            f"{printable(place)}: top1 {told['top1']:.2f}  top5 {told['top5']:.2f}  loss {told['loss']:.4f}  "
            f"calibration error {told['calibration_error']:.2f}  images {told['images']}"
        )
        if told["skipped"]:
            print(f"  {told['skipped']} pictures could not be read", file=sys.stderr)
        if "real_top1" in told:
            print(f"  ReaL top1 {told['real_top1']:.2f}")
        worst = sorted((v, k) for k, v in told["per_class"].items() if v is not None)[:3]
        print(printable("  hardest: " + ", ".join(f"{name} {value:.1f}" for value, name in worst)))
