"""Measure the training or inference speed of a model on this machine: images per second and peak memory.

Training is the update of `fathoms train` with AdamW, on random images that stay on the device. On a GPU the defaults
are the fastest settings: bfloat16 weights cast once per update, blocks compiled, forward and backward pass replayed as
one CUDA graph.
"""

from __future__ import annotations

import functools
import json as json_format
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import tyro

from fathoms.cli.flags.early_checks import check_counts
from fathoms.cli.flags.parse import Switches, given
from fathoms.cli.terminal.live_output import announced, progress_bar
from fathoms.errors import ConfigError
from fathoms.machine import check_device
from fathoms.models.zoo import model_config

if TYPE_CHECKING:
    from torch import Tensor

    from fathoms.bench import Contender

EXAMPLES = """
fathoms bench cait_s24_224 --batch-size 256 --against timm
fathoms bench cait_s24_224 --against timm --accelerated
fathoms bench vit_small_patch16_224 --mode infer --json
fathoms bench vit_digits --batch-size 32 --device cpu --compile none
"""


ACCELERATED = "accelerated"


@dataclass(frozen=True)
class Args:
    """Options of `fathoms bench`."""

    model: tyro.conf.Positional[str]
    """A name from `fathoms models`."""
    mode: Literal["train", "infer"] = "train"
    """Measure training updates, or inference only."""
    batch_size: int = 128
    """Images per batch."""
    precision: Literal["fp32", "autocast_fp32_stream", "autocast", "bf16"] = "bf16"
    """Precision of the forward and backward pass; bf16 casts the weights once per update."""
    compile: Literal["none", "model", "blocks"] = "blocks"
    """Compile the whole model, each of its blocks, or nothing."""
    launch: Literal["eager", "graph"] | None = None
    """Launch kernels one by one, or replay them as one CUDA graph. Default: graph on a GPU."""
    keep: Literal["lean", "all"] | None = None
    """Activations that a compiled forward pass saves: all, or those that cannot be recomputed element-wise (lean).
    Default: lean."""
    against: Literal["timm"] | None = None
    """Also measure timm's model of the same name, in turns: the same update, compiled whole, under autocast, in the
    quicker of torch.compile's modes default and reduce-overhead."""
    accelerated: bool = False
    """With --against timm: also measure timm's model after `fathoms.accelerate`, its blocks compiled."""
    turns: int = 5
    """Measurements of each model; the median counts."""
    steps: int = 5
    """Updates, or batches of inference, per measurement."""
    device: str = "auto"
    """auto, cpu or cuda."""
    json: bool = False
    """Print one JSON object on the last line."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    check_counts(args, ("batch_size", "turns", "steps"))
    check_device(args.device)
    config = model_config(args.model, **given(args.switches))
    if args.accelerated and args.against is None:
        raise ConfigError("--accelerated: measures timm's model; add --against timm")
    if args.keep is not None and args.compile == "none":
        raise ConfigError(
            "--keep would not be used: it is of compiled code; leave --compile none or --keep out"
        )
    if args.against is not None and given(args.switches):
        raise ConfigError("--against timm: timm has no model with these switches; leave one of the two out")
    import torch

    from fathoms.bench import Setting, prepare, quicker, race
    from fathoms.models.vit import ViT
    from fathoms.training.distributed import choose_device

    device = choose_device(args.device)
    launch = args.launch or ("graph" if device.type == "cuda" else "eager")
    torch.manual_seed(0)
    shape = (args.batch_size, config.in_channels, config.image_size, config.image_size)
    images = torch.randn(shape, device=device)
    labels = torch.randint(0, config.num_classes, (args.batch_size,), device=device)
    setting = Setting(args.precision, args.compile, launch, args.keep or "lean")
    contenders, failed = [], dict[str, str]()
    if args.against is not None:
        contenders, failed = timms_side(args, config.num_classes, (images, labels), launch)
    model = ViT(config).to(device)
    with announced("fathoms: compiling and warming up"):
        contenders.append(prepare("fathoms", model, images, labels, args.mode, setting))
    with progress_bar("measuring", args.turns) as advance:
        rows = race(contenders, args.batch_size, turns=args.turns, steps=args.steps, advance=advance)
    ratios: dict[str, float] = {}
    if args.against is not None:
        own = {name: row for name, row in rows.items() if name in (ACCELERATED, "fathoms")}
        timm = quicker(rows, "timm", failed)
        ratios = {name: row["images_per_second"] / timm["images_per_second"] for name, row in own.items()}
        rows = {"timm": timm, **own}
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if args.json:
        known = {"model": args.model, "mode": args.mode, "batch_size": args.batch_size, "device": where}
        print(json_format.dumps({**known, "setting": vars(setting), **named(ratios), **rows}))
        return 0
    for name, row in rows.items():
        print(describe(name, args.mode, row))
    for name, ratio in ratios.items():
        print(f"{name:<12} {ratio:.2f} times {beside(rows['timm'])}")
    return 0


def timms_side(
    args: Args, classes: int, batch: tuple[Tensor, Tensor], launch: str
) -> tuple[list[Contender], dict[str, str]]:
    """The model of timm in each mode and, if asked for, accelerated; and why a mode could not run."""
    from fathoms.bench import TIMM_SETTINGS, accelerated_setting, prepare_accelerated, prepare_modes
    from fathoms.models.build_timm import build_timm

    make = functools.partial(build_timm, args.model, classes, flag="--against timm", cudnn_attention=True)
    with announced("timm: building, compiling and warming up"):
        contenders, failed = prepare_modes("timm", make, batch, args.mode, TIMM_SETTINGS[args.mode])
    if args.accelerated:
        setting = accelerated_setting(args.mode, launch, args.compile)
        with announced("timm, accelerated: compiling and warming up"):
            faster, report = prepare_accelerated(make, batch, args.mode, setting)
        contenders += [] if faster is None else [faster]
        for note in report.notes:
            print(f"accelerate: {note}", file=sys.stderr)
    return contenders, failed


def named(ratios: dict[str, float]) -> dict[str, float | None]:
    """The ratios to timm under the names of the JSON object: null where nothing was raced."""
    own: dict[str, float | None] = {"ratio": ratios.get("fathoms")}
    return own | ({"accelerated_ratio": ratios[ACCELERATED]} if ACCELERATED in ratios else {})


def beside(row: dict[str, Any]) -> str:
    """The mode of timm that counts, and what the others reached."""
    said = f"timm under torch.compile's mode {row['compile_mode']}"
    others = {mode: rate for mode, rate in row["modes"].items() if mode != row["compile_mode"]}
    said += "".join(f" ({mode}: {rate:,.0f} images/s)" for mode, rate in others.items())
    return said + "".join(f" ({mode} failed: {why})" for mode, why in row.get("failed", {}).items())


def describe(name: str, mode: str, row: dict[str, Any]) -> str:
    memory = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.2f} GiB"
    unit = "update" if mode == "train" else "batch"
    return (
        f"{name:<12} {mode} {row['images_per_second']:,.0f} images/s, {row['ms']:.2f} ms per {unit}{memory}, "
        f"ready in {row['setup_s']:.0f} s"
    )
