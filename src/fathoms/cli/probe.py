"""See inside a model before, during or after training: one batch forward and backward, and a verdict in words.

TARGET is a model's name with any switches, timm/NAME, a run folder, a checkpoint or a weights file. DATA is a data
set; without it the images are scikit-learn's handwritten digits, resized. Nothing of the model is changed.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from fathoms.cli.flags.early_checks import check_folder
from fathoms.cli.flags.parse import Switches, given
from fathoms.cli.terminal.probe_words import default_note, say_written, summary, words
from fathoms.errors import ConfigError
from fathoms.files.atomic import check_absent
from fathoms.files.strict_json import finite
from fathoms.names.optimizers import OptimizerName

EXAMPLES = """
fathoms probe --depth 96 --residual layerscale
fathoms probe cait_s24_224 photos/ --norm dyt --lr 5e-4 --figures figures
fathoms probe timm/swin_tiny_patch4_window7_224 --full
fathoms probe runs/NAME --figures figures
fathoms probe --depths 12,24,48,96 --axis residual=none,layerscale,rezero --figures figures
fathoms probe --coordinates depth=6,12,24,48 --lr 1e-3 --opt adamw
"""

SMALL = 64
"""Side in pixels up to which a batch is of 64 images by default; above it of 8."""


@dataclass(frozen=True)
class Args:
    """Model, images and what to measure."""

    target: tyro.conf.Positional[str | None] = None
    """A model's name, timm/NAME, a run folder, a checkpoint or a weights file. Default: vit_digits."""
    data: tyro.conf.Positional[str | None] = None
    """The images: a data set. Default: handwritten digits."""
    model: str | None = None
    """Name of the model, where TARGET is a weights file that does not say it."""
    batch_size: int | None = None
    """Images in the batch. Default: 64, or 8 where images are larger than 64 pixels."""
    seed: int = 0
    """Random seed of the weights."""
    lr: float = 1e-3
    """Learning rate of the first steps and of the coordinate check."""
    opt: OptimizerName = "adamw"
    """Their optimizer."""
    steps: int = 10
    """Optimizer steps taken on a copy for the verdict; 0: judge the initialisation alone."""
    depths: str | None = None
    """Sweep over these depths at initialisation, such as 12,24,48,96."""
    axis: str | None = None
    """Option to sweep with --depths, such as residual=none,layerscale,rezero."""
    coordinates: str | None = None
    """Coordinate check over sizes, such as depth=6,12,24,48 or dim=64,128,256: ten steps at each, three seeds."""
    full: bool = False
    """Print every block and every column."""
    figures: str | None = None
    """Write pictures (SVG, PNG, JSON) and the page probe.html to this folder."""
    overwrite: bool = False
    """Replace pictures and the page that are in the folder of --figures already."""
    json: bool = False
    """Print one JSON object."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    """Measure, and print the summary, the sweep or the coordinate check."""
    _check(args)
    if args.figures is not None:
        _check_figures(args, Path(args.figures))
    if args.coordinates is not None:
        from fathoms.cli.probe_sizes import run_coordinates

        return run_coordinates(args)
    if args.depths is not None:
        from fathoms.cli.probe_sizes import run_sweep

        return run_sweep(args)
    return _run_one(args)


def _check(args: Args) -> None:
    if args.axis is not None and args.depths is None:
        raise ConfigError("--axis would not be used: it goes with --depths; add that")
    if args.depths is not None and args.coordinates is not None:
        raise ConfigError("--depths and --coordinates are two commands; give one of them")
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size}: use 1 or more")
    _check_sizes(args)
    if args.steps < 0:
        raise ConfigError(f"--steps {args.steps}: use 0 or more")
    if not args.lr > 0:
        raise ConfigError(f"--lr {args.lr}: use a number above 0")


def _check_sizes(args: Args) -> None:
    """Refuse flags that --depths or --coordinates does not read."""
    for flag, used in (("--full", args.full), ("--steps 0", args.steps == 0)):
        if used and (args.coordinates or args.depths):
            raise ConfigError(f"{flag} would not be used with --depths or --coordinates; leave it out")
    for name in ("lr", "opt", "steps") if args.depths is not None else ():
        if getattr(args, name) != getattr(Args, name):
            flag = f"--{name} {getattr(args, name)}"
            raise ConfigError(
                f"{flag} would not be used: --depths probes models before any step; leave it out"
            )
    if args.model is not None and args.target is not None and (args.depths or args.coordinates):
        raise ConfigError(f"--model {args.model} would not be used: TARGET names the model; leave it out")


def _check_trained(args: Args) -> None:
    """Refuse flags of the first steps, which a trained model does not take."""
    for name in ("seed", "lr", "opt", "steps"):
        if getattr(args, name) != getattr(Args, name):
            flag = f"--{name} {getattr(args, name)}"
            raise ConfigError(f"{flag}: would not be used, since {args.target} is trained; leave it out")


def _check_figures(args: Args, folder: Path) -> None:
    """Refuse a folder in which pictures would be replaced, before anything is measured."""
    from fathoms.probes.pictures.names import OF_A_MODEL, PAGE, picture_files

    check_folder("--figures", folder)
    sizes = [name for name in ("coordinates", "depths") if getattr(args, name) is not None]
    names = {"coordinates": ("coordinates",), "depths": ("sweep",)}.get("".join(sizes), OF_A_MODEL)
    check_absent([*picture_files(folder, names), *([] if sizes else [folder / PAGE])], args.overwrite)


def _run_one(args: Args) -> int:
    from fathoms.cli.targets import check_head, load_images, load_target
    from fathoms.probes.signal import probe

    target = load_target(args.target, args.model, given(args.switches), args.seed)
    if target.trained:
        _check_trained(args)
    elif args.steps:
        check_head(target, "add --steps 0, to judge the initialisation alone")
    size = batch_of(args, target)
    # Each step gets a batch of its own, as in training and in the calibration of the verdict.
    spare = 0 if target.trained else size * max(args.steps - 1, 0)
    images, labels = load_images(target, args.data, size, spare)
    signal = probe(target.model, images[:size], None if labels is None else labels[:size])
    verdict = judge(args, target, signal, images, labels)
    found: dict[str, Any] = {
        "model": args.target or target.name,
        "config": None if target.config is None else target.config.to_dict(),
    }
    found |= {"blocks": signal.depth, "images": size, **verdict, **signal.to_json()}
    if args.figures is not None:
        found["figures"] = _draw(Path(args.figures), target, images, found)
    if args.json:
        print(json_format.dumps(found))
        return 0
    if args.full:
        print(signal.table(), end="\n\n")
    lines = summary(found)
    if (args.target, args.model, args.data) == (None, None, None):
        lines += default_note(found["config"], given(args.switches))
    print("\n".join(lines))
    say_written(found.get("figures", []))
    return 0


def batch_of(args: Args, target: Any) -> int:
    """Images in a batch."""
    return args.batch_size or (64 if target.image_size <= SMALL else 8)


def judge(args: Args, target: Any, signal: Any, images: Any, labels: Any) -> dict[str, Any]:
    """The verdict on the start of an untrained model, on the drift of a run, or on what a trained one shows."""
    from fathoms.probes.verdicts.start import Basis, start_verdict
    from fathoms.probes.verdicts.start_features import start_features
    from fathoms.probes.verdicts.thresholds import THRESHOLDS

    sites = signal.to_json()["sites"]
    config = None if target.config is None else target.config.to_dict()
    basis = Basis(args.steps, batch_of(args, target), config)
    state = start_verdict(start_features(signal), sites, basis=basis)
    if target.trained:
        from fathoms.probes.verdicts.drift import drift_verdict

        drift = drift_verdict(_run_rows(target), config=config)
        found = None if drift is None else drift.to_json()
        return {"trained": True, "drift": found, "start": state.to_json()}
    if args.steps == 0:
        return {"trained": False, "start": state.to_json(), "steps": None}
    steps = _first_steps(args, target, images, labels)
    features = start_features(signal, steps.after, steps.losses)
    features["nonfinite"] = float(steps.after is None or bool(features.get("nonfinite")))
    after = sites if steps.after is None else steps.after.to_json()["sites"]
    basis = replace(basis, sites_after=0 if steps.after is None else args.steps)
    start = start_verdict(features, after, THRESHOLDS, basis)
    taken = {
        "lr": args.lr,
        "opt": args.opt,
        "losses": [finite(loss) for loss in steps.losses],
        "sites": after,
    }
    told = {**start.to_json(), "came_true": _came_true(args, start)}
    return {"trained": False, "start": told, "steps": taken, "features": features}


def _came_true(args: Args, verdict: Any) -> float | None:
    """The share of such verdicts that came true; None where the calibration has not measured it."""
    from fathoms.probes.verdicts.thresholds import CALIBRATED_OPTIMIZER, CALIBRATED_STEPS, PRECISION

    measured = (args.steps, args.opt) == (CALIBRATED_STEPS, CALIBRATED_OPTIMIZER)
    return PRECISION.get(verdict.outcome) if verdict.calibrated and measured else None


def _run_rows(target: Any) -> list[dict[str, Any]]:
    """The measurements of a run's probe.jsonl."""
    from fathoms.files.jsonl import read_lines
    from fathoms.train.record.run_folder import FORMAT

    if target.run is None:
        return []
    path = target.run / "probe.jsonl"
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        # Rows of the first format have no version.
        if row.get("version", 1) not in range(1, FORMAT + 1):
            raise ConfigError(
                f"{path}: line {number} has version {row['version']!r}, this fathoms reads up to {FORMAT}; "
                "use the fathoms that wrote it, or a newer one"
            )
    return rows


def _first_steps(args: Args, target: Any, images: Any, labels: Any) -> Any:
    import torch

    from fathoms.probes.first_steps import take_first_steps

    if labels is None:
        labels = torch.randint(target.num_classes, (len(images),), generator=torch.Generator().manual_seed(0))
    size = batch_of(args, target)
    return take_first_steps(
        target.model, images, labels, optimizer_of(args), steps=args.steps, batch_size=size
    )


def optimizer_of(args: Args) -> Any:
    """A function that makes the optimizer of --opt and --lr for a model."""
    from fathoms.models.param_groups import param_groups
    from fathoms.train.optim.build import build_optimizer

    return lambda model: build_optimizer(param_groups(model, 0.05), args.opt, lr=args.lr)


def _draw(folder: Path, target: Any, images: Any, found: dict[str, Any]) -> list[str]:
    from fathoms.report.probe_page import write_probe_page

    return write_probe_page(folder, target.model, images[0], found, _run_rows(target), words(found))
