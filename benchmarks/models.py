"""Whole models against timm + torch.compile on one GPU: `python benchmarks/models.py --json --output results/models`.

Each row runs both in one process on the same random images, in turns; the median turn counts. A training step is the
update of `fathoms train` around either model, with its guard, parameter groups and fused AdamW. timm's models are
compiled as people compile them: torch.compile of the whole model under bfloat16 autocast, and for inference with
bfloat16 weights, in the quicker of its modes "default", which launches kernel by kernel, and "reduce-overhead", which
replays CUDA graphs. `--timm-compile blocks` compiles each of timm's blocks instead, in mode "default" alone: CaiTs,
which no launch holds up, are as quick so, and compile in seconds instead of minutes. fathoms runs as `fathoms bench`
does, as a replayed CUDA graph. `--warm` only fills torch's compile cache, so that a later run starts sooner; several
may warm at once.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fathoms
from fathoms.bench import TIMM_SETTINGS, Setting, modes_of, prepare, prepare_modes, quicker, race
from fathoms.models.build_timm import build_timm
from result_rows import load_report, save_report
from timing import device_limits, shares_of_limit

NARROW = "vit_{}_embed_dim192_patch16_head3_depth36"


def narrow_timm() -> nn.Module:
    """The ViT of 36 blocks and 192 channels, which has no name in timm."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(embed_dim=192, depth=36, num_heads=3)


def make_timm(name: str) -> nn.Module:
    """One of timm's models, with torch's own choice of attention kernels."""
    return build_timm(name, 1000, cudnn_attention=True)


def ours(name: str, **options: Any) -> nn.Module:
    """A model of this library."""
    return fathoms.create_model(name, **options)


def folded(name: str) -> nn.Module:
    """A model with its scales folded away; uneven scales give folding something to do."""
    torch.manual_seed(0)
    model = fathoms.create_model(name, norm_init="normal").eval()
    return fathoms.fold(model)[0].cuda()


@dataclass(frozen=True)
class Row:
    """Two models, a batch, and the ratios to reach."""

    mode: str
    batch: int
    size: int
    make: Callable[[], nn.Module]
    other: Callable[[], nn.Module]
    speed: float | None = None
    memory: float | None = None
    other_setting: Setting | None = None
    names: tuple[str, str] = field(default=("fathoms", "timm"))

    def compiled_by(self, scope: str) -> Row:
        """The row with timm's model compiled whole or by blocks; rows that race something else stay as they are."""
        if self.other_setting is not None:
            return self
        return replace(self, other_setting=replace(TIMM_SETTINGS[self.mode], compile=scope))

    def settings(self) -> tuple[Setting, Setting]:
        """Those of this library's model and of the other."""
        return Setting(), self.other_setting or TIMM_SETTINGS[self.mode]


def cait(name: str, mode: str, batch: int, speed: float, memory: float | None = None, **options: Any) -> Row:
    """A CaiT of both libraries."""
    size = int(name[-3:])
    return Row(
        mode,
        batch,
        size,
        functools.partial(ours, name),
        functools.partial(make_timm, name),
        speed,
        memory,
        **options,
    )


def vit(name: str, batch: int, speed: float, **options: Any) -> Row:
    """A ViT of both libraries."""
    return Row(
        "train",
        batch,
        224,
        functools.partial(ours, name),
        functools.partial(make_timm, name),
        speed,
        **options,
    )


LAYERNORM, SCALER = NARROW.format("layernorm"), NARROW.format("learnable_scaler")
ROWS = {
    "cait_s24_224": cait("cait_s24_224", "train", 256, 2.8, 0.45),
    "cait_s24_384": cait("cait_s24_384", "train", 64, 3.5, 0.4),
    "cait_xxs24_224": cait("cait_xxs24_224", "train", 256, 1.8, 0.5),
    "cait_xs24_384": cait("cait_xs24_384", "train", 64, 1.8, 0.5),
    "cait_m36_384": cait("cait_m36_384", "train", 16, 2.2, 0.5),
    "vit_192x36": Row("train", 256, 224, functools.partial(ours, LAYERNORM), narrow_timm, 1.5, 0.9),
    "vit_192x36_scaler": Row(
        "train",
        256,
        224,
        functools.partial(ours, SCALER),
        functools.partial(ours, LAYERNORM),
        1.1,
        other_setting=Setting(),
        names=("learnable_scaler", "layernorm"),
    ),
    "vit_small": vit("vit_small_patch16_224", 256, 1.35),
    "vit_base": vit("vit_base_patch16_224", 256, 1.25),
    "cait_s24_224_infer": cait("cait_s24_224", "infer", 256, 3.0),
    "cait_s24_384_infer": cait("cait_s24_384", "infer", 64, 2.5),
    "vit_192x36_folded_infer": Row("infer", 256, 224, functools.partial(folded, SCALER), narrow_timm, 1.5),
}


def main() -> None:
    """Measure the rows; with `--json` the last line is one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="which rows; default: all")
    parser.add_argument(
        "--output", type=Path, help="write OUTPUT.json and OUTPUT.md after every row; other rows there stay"
    )
    parser.add_argument("--timm-compile", choices=("model", "blocks"), default="model")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm", action="store_true", help="only compile both sides, into torch's cache")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one")
    limits = {} if arguments.warm else device_limits()
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **limits}
    report = load_report(arguments.output)
    for name in arguments.rows or ROWS:
        began = time.perf_counter()
        row = ROWS[name].compiled_by(arguments.timm_compile)
        if arguments.warm:
            warm(row)
            continue
        try:
            report["rows"][name] = where | measure(row, limits, arguments.turns, arguments.steps)
        except (RuntimeError, fathoms.FathomsError) as error:
            report["rows"][name] = {"failed": " ".join(str(error).split())[:300]}
        print(f"{name}: {as_line(report['rows'][name])} [{time.perf_counter() - began:.0f} s]", flush=True)
        forget()
        save_report(report, arguments.output, as_table)
    if arguments.json:
        print(json.dumps(report))


def make_batch(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and labels on the device."""
    torch.manual_seed(0)
    images = torch.randn(row.batch, 3, row.size, row.size, device="cuda")
    return images, torch.randint(0, 1000, (row.batch,), device="cuda")


def warm(row: Row) -> None:
    """Compile both sides, so that a later process finds them in the cache."""
    own, other = row.settings()
    sides = [(row.make, own), *((row.other, each) for each in modes_of(other, cuda=True))]
    for make, setting in sides:
        prepare(row.mode, make(), *make_batch(row), row.mode, setting)
        forget()


def measure(row: Row, limits: dict[str, float], turns: int, steps: int) -> dict[str, Any]:
    """Both sides of one row, in turns."""
    batch = make_batch(row)
    own, other = row.settings()
    model = row.make()
    flops = getattr(model, "flop_count", lambda: 0)()
    contender = prepare(row.names[0], model, *batch, row.mode, own)
    others, failed = prepare_modes(row.names[1], row.other, batch, row.mode, other)
    rows = race([contender, *others], row.batch, turns=turns, steps=steps)
    mine, theirs = rows[row.names[0]], quicker(rows, row.names[1], failed)
    other = replace(other, mode=theirs["compile_mode"])
    result = {row.names[0]: mine, row.names[1]: theirs}
    for side in (mine, theirs):
        side.update(shares_of_limit(flops * row.batch, side["peak_gib"], side["ms"], limits, row.mode))
    return {
        "mode": row.mode,
        "batch": row.batch,
        "sides": list(row.names),
        "settings": {row.names[0]: vars(own), row.names[1]: vars(other)},
        "ratio": mine["images_per_second"] / theirs["images_per_second"],
        "memory_ratio": mine["peak_gib"] / theirs["peak_gib"],
        "wanted_ratio": row.speed,
        "wanted_memory_ratio": row.memory,
        **result,
    }


def forget() -> None:
    """Free what a row used before the next."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def as_line(row: dict[str, Any]) -> str:
    """One row as a line of text."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    sides = ", ".join(
        f"{name} {row[name]['images_per_second']:,.0f} images/s {row[name]['peak_gib']:.2f} GiB"
        for name in row["sides"]
    )
    return f"{sides}; {row['ratio']:.2f}x, memory {row['memory_ratio']:.2f}x"


def wanted(value: float, sign: str, goal: float | None) -> str:
    """A ratio, and in brackets the goal."""
    return f"{value:.2f}" if goal is None else f"{value:.2f} ({sign} {goal})"


def _span(values: list[float], form: str) -> str:
    """One number where all are printed the same, else the least and the greatest."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def as_table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    made = [row for row in report["rows"].values() if "failed" not in row]
    where = ""
    if made:
        machines = sorted({f"one {row['device']}, torch {row['torch']}" for row in made})
        matrix, copy = ([row[key] for row in made] for key in ("matrix_tflops", "copy_tbps"))
        where = (
            f" on {'; '.join(machines)}; both sides of a row in one process, in turns. Measured limits: "
            f"{_span(matrix, '.0f')} TFLOP/s bfloat16 products, {_span(copy, '.2f')} TB/s copies"
        )
    lines = [
        "# Whole models beside timm + torch.compile",
        "",
        f"Made by `python benchmarks/models.py --output results/models`{where}.",
        "",
        "| row | batch | images/s | other, images/s | ratio (wanted) | peak GiB | other | ratio (wanted) "
        "| share of matrix rate / of copy rate | other: compiled by, mode, launch |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed']} |")
            continue
        mine, theirs = (row[side] for side in row["sides"])
        setting = row["settings"][row["sides"][1]]
        memory = wanted(row["memory_ratio"], "≤", row["wanted_memory_ratio"])
        cells = [
            name,
            str(row["batch"]),
            f"{mine['images_per_second']:,.0f}",
            f"{theirs['images_per_second']:,.0f}",
            wanted(row["ratio"], "≥", row["wanted_ratio"]),
            f"{mine['peak_gib']:.2f}",
            f"{theirs['peak_gib']:.2f}",
            memory,
            f"{mine['matrix_share']:.0%} / {mine['bytes_share']:.0%}",
            f"{setting['compile']}, {setting.get('mode', 'default')}, {setting['launch']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
