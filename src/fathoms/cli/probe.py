"""See inside a model before, during or after training: one batch forward and backward, and a verdict in words.

TARGET is a model's name with any switches, timm/NAME, a run folder, a checkpoint or a weights file. DATA is a data
set; without it the images are scikit-learn's handwritten digits, resized. Nothing of the model is changed.
"""

from __future__ import annotations

import json as json_format
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from fathoms.cli.flags.early_checks import check_folder
from fathoms.cli.flags.parse import Switches, given
from fathoms.errors import ConfigError, flag_of
from fathoms.files import check_absent, finite
from fathoms.optimizer_facts import OptimizerName
from fathoms.text_table import aligned, plural

if TYPE_CHECKING:
    from fathoms.probes.signal import Signal

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
    steps: int | None = None
    """Optimizer steps taken on a copy for the verdict; 0: describe the initialisation alone. Default: 50, or as many as
    a minute allows; 10 for --coordinates."""
    depths: str | None = None
    """Sweep over these depths at initialisation, such as 12,24,48,96."""
    axis: str | None = None
    """Option to sweep with --depths, such as residual=none,layerscale,rezero."""
    coordinates: str | None = None
    """Coordinate check over sizes, such as depth=6,12,24,48 or dim=64,128,256: ten steps at each, five seeds."""
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
    check(args)
    if args.figures is not None:
        _check_figures(args, Path(args.figures))
    if args.coordinates is not None:
        from fathoms.cli.probe_sizes import run_coordinates

        return run_coordinates(args)
    if args.depths is not None:
        from fathoms.cli.probe_sizes import run_sweep

        return run_sweep(args)
    return _run_one(args)


def check(args: Args) -> None:
    """Refuse flags that contradict each other, and values out of range."""
    if args.axis is not None and args.depths is None:
        raise ConfigError("--axis would not be used: it goes with --depths; add that")
    if args.depths is not None and args.coordinates is not None:
        raise ConfigError("--depths and --coordinates are two commands; give one of them")
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size}: use 1 or more")
    _check_sizes(args)
    if args.steps is not None and args.steps < 0:
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
    from fathoms.probes.probe_figures import OF_A_MODEL, PAGE, picture_files

    check_folder("--figures", folder)
    sizes = [name for name in ("coordinates", "depths") if getattr(args, name) is not None]
    names = {"coordinates": ("coordinates",), "depths": ("sweep",)}.get("".join(sizes), OF_A_MODEL)
    check_absent([*picture_files(folder, names), *([] if sizes else [folder / PAGE])], args.overwrite)


def measured(args: Args, target: Any = None) -> tuple[Any, Any, Signal, dict[str, Any]]:
    """The model, its images, the signal with what it is judged by, and the verdict as plain values.

    `target` is the model where it is loaded already.
    """
    from fathoms.cli.targets import check_head, classes_of, load_images, load_target
    from fathoms.probes.coordinates import STEPS
    from fathoms.probes.signal import probe

    if target is None:
        switches = given(args.switches)
        target = load_target(args.target, args.model, switches, args.seed)
        # A new head has an output for each class of the data, as in training.
        number = target.num_classes if target.trained or "num_classes" in switches else classes_of(args.data)
        if number != target.num_classes:
            target = load_target(args.target, args.model, {**switches, "num_classes": number}, args.seed)
    if target.trained:
        _check_trained(args)
    elif args.steps != 0:
        check_head(target, "add --steps 0, to judge the initialisation alone")
    size = batch_of(args, target)
    # Each step gets a batch of its own, as in training.
    spare = 0 if target.trained else size * max((STEPS if args.steps is None else args.steps) - 1, 0)
    images, labels = load_images(target, args.data, size, spare)
    signal = probe(target.model, images[:size], None if labels is None else labels[:size])
    return target, images, signal, judge(args, target, signal, images, labels)


def _run_one(args: Args) -> int:
    target, images, signal, verdict = measured(args)
    found: dict[str, Any] = {
        "model": args.target or target.name,
        "config": None if target.config is None else target.config.to_dict(),
    }
    found |= {"blocks": signal.depth, "images": batch_of(args, target), **verdict, **signal.to_json()}
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
    if "figures" in found:
        print(f"written: {', '.join(found['figures'])}")
    return 0


def batch_of(args: Args, target: Any) -> int:
    return args.batch_size or (64 if target.image_size <= SMALL else 8)


def judge(args: Args, target: Any, signal: Signal, images: Any, labels: Any) -> dict[str, Any]:
    """The verdict on the start of an untrained model, or on the drift of a run beside what a trained one shows."""
    import torch

    from fathoms.cli.targets import optimizer_of
    from fathoms.probes.coordinates import SECONDS, STEPS, take_first_steps
    from fathoms.probes.verdict import Verdict, drift_verdict, site_findings

    if target.trained:
        signal.drift = drift = drift_verdict(_run_rows(target), config=signal.config)
        said = "Drift: no probe.jsonl with four measurements or more" if drift is None else str(drift)
        now = Verdict("", site_findings(signal.to_json()["sites"], signal.config))
        trend = None if drift is None else drift.to_json()
        words = [*said.splitlines(), *str(now).splitlines()[1:]]
        return {"trained": True, "drift": trend, "findings": now.to_json()["findings"], "words": words}
    steps = None
    if args.steps != 0:
        if labels is None:
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(target.num_classes, (len(images),), generator=generator)
        steps = take_first_steps(
            target.model,
            images,
            labels,
            optimizer_of(args),
            opt=args.opt,
            lr=args.lr,
            steps=args.steps or STEPS,
            batch_size=batch_of(args, target),
            seconds=SECONDS if args.steps is None else math.inf,
        )
    signal.first_steps = steps
    start = signal.verdict()
    found: dict[str, Any] = {"trained": False, "start": start.to_json(), "words": str(start).splitlines()}
    if steps is None:
        return {**found, "steps": None}
    sites = (signal if steps.after is None else steps.after).to_json()["sites"]
    losses = [finite(loss) for loss in steps.losses]
    return {**found, "steps": {"lr": args.lr, "opt": args.opt, "losses": losses, "sites": sites}}


def _run_rows(target: Any) -> list[dict[str, Any]]:
    """The measurements of a run's probe.jsonl."""
    from fathoms.training.run_folder import FORMAT
    from fathoms.untrusted import read_lines

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


def _draw(folder: Path, target: Any, images: Any, found: dict[str, Any]) -> list[str]:
    from fathoms.report.probe_page import write_probe_page

    return write_probe_page(folder, target.model, images[0], found, _run_rows(target), found["words"])


def summary(found: dict[str, Any]) -> list[str]:
    """Summary that fits a screen: nine sites from the first to the last, and the verdict."""
    from fathoms.probes.signal import BRIEF

    sites = found["sites"]
    chosen = sorted({round(i * (len(sites) - 1) / 8) for i in range(9)})
    columns = [name for name in BRIEF if any(sites[i].get(name) is not None for i in chosen)]
    rows = [
        (sites[i]["block"], sites[i]["branch"], *(_number(sites[i].get(name)) for name in columns))
        for i in chosen
    ]
    head = f"{found['model']}: {plural(found['blocks'], 'block')}, {plural(found['images'], 'image')}"
    every = len(chosen) == len(sites)
    shown = f"{len(sites)} branches (--full shows every column)"
    lines = [f"{head}; {shown if every else f'{len(chosen)} of {len(sites)} branches (--full shows all)'}"]
    lines += aligned(("block", "branch", *columns), rows).splitlines()
    if found["projection_ratio"] is not None:
        layer, times = found["projection"]["layer"], _number(found["projection_ratio"])
        lines.append(f"Gradient on a weight of {layer}: {times} times that of the median branch")
    lines += [f"Not measured: {sentence}" for sentence in found.get("unseen", ())]
    return [*lines, "", *found["words"]]


def _number(value: float | None) -> str:
    # Adding zero turns the -0 that rounding leaves into 0.
    return "-" if value is None else f"{value + 0.0:.3g}"


def default_note(config: dict[str, Any], switches: dict[str, Any]) -> list[str]:
    """A line where `fathoms train` with the same flags trains another model than the default that was probed."""
    from fathoms.training.recipe import read_recipe

    trained = {**read_recipe("digits")["model"], **switches}
    differ = [name for name, value in trained.items() if name != "name" and config[name] != value]
    if not differ:
        return []
    flags = " ".join(f"{flag_of(name)} {trained[name]}" for name in differ)
    return [f"Note: `fathoms train` takes the model of its recipe digits; to probe that, add {flags}"]
