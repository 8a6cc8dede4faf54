"""`fathoms probe` over sizes: sweeps at initialisation (--depths, --axis) and the coordinate check (--coordinates)."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Any

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import given, parse_setting
from fathoms.errors import ConfigError

SEEDS = 3
IMAGES = 32


def run_sweep(args: Any) -> int:
    """Probe every depth and value at initialisation, and print one line for each."""
    from fathoms.cli.flags.plan_flags import parse_axis
    from fathoms.cli.targets import load_images, load_target
    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config
    from fathoms.probes.coordinates import sweep
    from fathoms.text_table import aligned

    depths = whole_numbers(args.depths, "--depths")
    axis, values = ("", [""]) if args.axis is None else parse_axis(args.axis)
    name, switches = _own_name(args, "--depths"), given(args.switches)
    if axis == "depth" or "depth" in switches:
        raise ConfigError("--depths gives the depths; leave depth out elsewhere")
    options = {value: settings_of(axis, value) if axis else {} for value in values}
    # Every config is checked before the first model is built.
    for given_options in options.values():
        model_config(name, **{**switches, **given_options, "depth": depths[0]})
    target = load_target(name, None, {**switches, "depth": depths[0]}, args.seed)
    batch = load_images(target, args.data, args.batch_size or IMAGES)
    rows = sweep(
        lambda **own: ViT(model_config(name, **{**switches, **own})), depths, options, batch, args.seed
    )
    plain = {value: {str(depth): row for depth, row in found.items()} for value, found in rows.items()}
    written = []
    if args.figures is not None:
        from fathoms.probes.probe_figures import save_picture, sweep_figure

        written = save_picture(sweep_figure(rows, axis), plain, Path(args.figures), "sweep")
    if args.json:
        print(json_format.dumps({"model": name, "axis": axis, "sweep": plain, "figures": written}))
        return 0
    columns = ("growth", "gradient_ratio", "gradient_factor", "ratio_median", "token_cosine", "largest")
    lines = [
        (value or name, str(depth), *("-" if row[c] is None else f"{row[c]:.3g}" for c in columns))
        for value, found in rows.items()
        for depth, row in found.items()
    ]
    print(aligned((axis or "model", "depth", *columns), lines))
    if written:
        print(f"written: {', '.join(written)}")
    return 0


def run_coordinates(args: Any) -> int:
    """Take ten steps at every size, and print the slopes and the verdict."""
    from fathoms.cli.targets import check_head, load_images, load_target, optimizer_of
    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config
    from fathoms.probes.coordinates import coordinate_check

    axis, sizes = _sizes(args.coordinates)
    name, switches = _own_name(args, "--coordinates"), given(args.switches)
    if axis in switches:
        raise ConfigError(f"--coordinates gives the sizes; leave --{axis} out")
    configs = {size: _config(model_config(name, **switches), axis, size) for size in sizes}
    target = load_target(name, None, switches, args.seed)
    check_head(target, "leave it out")
    images, labels = load_images(target, args.data, args.batch_size or IMAGES)
    check = coordinate_check(
        lambda size: ViT(configs[size]),
        sizes,
        images,
        labels,
        optimizer=optimizer_of(args),
        steps=args.steps or 10,
        seeds=tuple(range(args.seed, args.seed + SEEDS)),
    )
    written = []
    if args.figures is not None:
        from fathoms.probes.probe_figures import save_picture

        written = save_picture(check.plot(axis), check.to_json(), Path(args.figures), "coordinates")
    if args.json:
        print(json_format.dumps({"model": name, "axis": axis, **check.to_json(), "figures": written}))
        return 0
    print(f"{name}, {axis} {', '.join(map(str, sizes))}: {args.opt} at lr {args.lr:g}, {SEEDS} seeds")
    for quantity, slope in (("mean |x_L|", check.stream), ("mean |logit|", check.logits)):
        print(
            f"  rise of {quantity:<13} ~ {axis}^{slope.value:+.2f}  "
            f"(95 % interval {slope.low:+.2f} to {slope.high:+.2f} over the seeds): {slope.verdict}"
        )
    print(f"Coordinate check: {ADVICE[check.verdict]}")
    if written:
        print(f"written: {', '.join(written)}")
    return 0


EXAMPLE = {"depth": "depth=6,12,24,48", "dim": "dim=64,128,256"}


def _sizes(text: str) -> tuple[str, list[int]]:
    """The size that --coordinates varies, and its values."""
    axis, _, values = text.partition("=")
    if axis not in ("depth", "dim"):
        raise ConfigError(f"--coordinates {text}: sizes are depth or dim; write depth=6,12,24,48")
    if not values:
        raise ConfigError(f"--coordinates {text}: has no sizes; write {EXAMPLE[axis]}")
    sizes = whole_numbers(values, "--coordinates")
    if len(set(sizes)) < 2:
        raise ConfigError(f"--coordinates {text}: one size gives no slope; give two or more with commas")
    return axis, sizes


def _own_name(args: Any, flag: str) -> str:
    """The name of an architecture of fathoms; others cannot be built at another size."""
    from fathoms.cli.targets import DEFAULT
    from fathoms.models.model_sources import resolve

    name = args.target or args.model or DEFAULT
    if resolve(name, "TARGET").kind != "zoo":
        raise ConfigError(
            f"TARGET {name}: {flag} builds a model at several sizes, which fathoms' own can; give a name of "
            "`fathoms models`, with switches"
        )
    return name


ADVICE = {
    "flat": "FLAT; a learning rate found at one size may be tried at the others",
    "growing": "GROWING; a larger model moves further per step: scale the branches or the learning rate with the size",
    "vanishing": "VANISHING; a larger model moves less per step: its learning rate is scaled down too far",
    "unclear": "UNCLEAR; the seeds disagree: give more sizes, or a larger --batch-size",
    "diverged": "DIVERGED; a model did not stay finite: use a lower --lr",
}


def _config(config: Any, axis: str, size: int) -> Any:
    """The config at a size; heads keep their width, as every rule for widths assumes."""
    if axis == "depth":
        return config.replace(depth=size)
    width = config.dim // config.heads
    if size % width:
        raise ConfigError(f"--coordinates dim={size}: heads are {width} wide; use multiples of {width}")
    return config.replace(dim=size, heads=size // width)


def whole_numbers(text: str, flag: str) -> list[int]:
    """Whole numbers above zero, separated by commas."""
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() and int(piece) > 0 for piece in pieces):
        raise ConfigError(f"{flag} {text!r}: write whole numbers above 0 with commas, such as 12,24,48")
    return [int(piece) for piece in pieces]


def settings_of(axis: str, value: str) -> dict[str, Any]:
    """The field of ViTConfig that one value of --axis sets, parsed as its own flag is."""
    found = given(parse_setting(train_command, "train", (axis, value), "--axis").switches)
    if not found:
        raise ConfigError(f"--axis {axis}: is not an option of a model; see `fathoms parts`")
    return found
