"""The speed of each part of 2025 and 2026 in a ViT of 24 blocks and 192 channels, beside the same ViT without it.

    python benchmarks/parts.py --output results/parts           # three to four minutes on an H200
    python benchmarks/parts.py --output results/parts --rows keel mv_split
    python benchmarks/parts.py --tiny                           # on a CPU, to see that it works

A row is a training step of 256 images of 224 pixels as `fathoms train` runs it on a GPU: bfloat16 working copy,
compiled blocks, one CUDA graph, guard, parameter groups, fused AdamW. The plain ViT is compiled once and stays; part
and plain ViT take turns. OUTPUT.json and OUTPUT.md are written after every row, and other rows there stay. A part that
costs more than a tenth says why, from WHY below.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch

import fathoms
from fathoms.bench import Contender, Setting, prepare, race
from result_rows import load_report, save_report

SHAPE = {"dim": 192, "heads": 3, "depth": 24, "patch_size": 16, "image_size": 224}
TINY = {"dim": 16, "heads": 2, "depth": 4, "patch_size": 16, "image_size": 64}
BATCH = 256
# Of the plain ViT's images a second; a part below has to say why.
SHARE = 0.9

PARTS: dict[str, dict[str, Any]] = {
    "layerscale": {"residual": "layerscale"},
    "completep": {"residual": "completep"},
    "layernorm_scaling": {"residual": "layernorm_scaling"},
    "orthogonal": {"residual": "orthogonal"},
    "mv_split": {"residual": "mv_split"},
    "prores": {"residual": "prores"},
    "sandwich": {"attn_placement": "pre_post", "mlp_placement": "pre_post"},
    "keel": {"attn_placement": "keel", "mlp_placement": "keel"},
    "mix_ln": {"placement_by_depth": "0-2:post"},
    "head_gate": {"attn_gate": "head"},
    "channel_gate": {"attn_gate": "channel"},
    "conv_stem": {"stem": "conv", "stem_layers": 2, "stem_kernel": 7},
    "seqpool": {"readout": "seqpool"},
    "late_class_token": {"class_token_block": 3},
}

# Why a part is expected to cost what it does, from what it reads and writes; printed where it costs more than a tenth.
WHY = {
    "layerscale": "its gradient is a sum over all tokens for each branch",
    "layernorm_scaling": "its factor stands between norm and linear, so the norm's gain is not absorbed",
    "orthogonal": "two inner products of branch and stream for each token, and a backward pass that reads both again; "
    "nothing of it is absorbed into a linear",
    "mv_split": "means over the tokens of an image of branch and stream, which stand between a branch and its "
    "addition, and two learned scales whose gradients are sums over all tokens",
    "prores": "its factor changes, so it is not absorbed into the linear: every branch is read and written once more",
    "sandwich": "twice as many norms: each reads and writes the stream's size, and so does its backward pass",
    "keel": "twice as many norms, the outer one on the stream, where its gain is not absorbed into a linear",
    "mix_ln": "two kinds of blocks; the gain of a post-norm is not absorbed into a linear",
    "head_gate": "a product of 192 by 3, too narrow for the matrix units, and the gated output is written once more",
    "channel_gate": "a product of 192 by 192 beside that of q, k and v, and the gated output is written once more",
    "conv_stem": "convolutions of 7x7 on 112x112 and 28x28 cells, and pooling, where the patch stem has one product",
    "late_class_token": "two kinds of blocks, and a copy of the tokens where the class token joins",
}


def make(options: dict[str, Any], tiny: bool) -> torch.nn.Module:
    """The ViT with a part."""
    shape = TINY if tiny else SHAPE
    return fathoms.create_model("vit_tiny_patch16_224", **{**shape, **options})


def contender(name: str, options: dict[str, Any], tiny: bool) -> Contender:
    """The ViT with a part, compiled and captured."""
    torch.manual_seed(0)
    size, batch = (64, 4) if tiny else (224, BATCH)
    device = "cpu" if tiny else "cuda"
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    setting = Setting("fp32", "none", "eager") if tiny else Setting()
    return prepare(name, make(options, tiny), images, labels, "train", setting)


def measure(name: str, plain: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """A part beside the plain ViT, in turns."""
    own = contender(name, PARTS[name], arguments.tiny)
    rows = race([own, plain], 4 if arguments.tiny else BATCH, turns=arguments.turns, steps=arguments.steps)
    mine, theirs = rows[name], rows["none"]
    flops = [make(options, arguments.tiny).flop_count() for options in (PARTS[name], {})]
    return {
        "options": PARTS[name],
        name: mine,
        "none": theirs,
        "ratio": mine["images_per_second"] / theirs["images_per_second"],
        "memory_ratio": mine["peak_gib"] / theirs["peak_gib"] if mine["peak_gib"] else None,
        "multiplications_ratio": flops[0] / flops[1],
    }


def as_line(name: str, row: dict[str, Any]) -> str:
    """One row as a line of text."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    rates = f"{row[name]['images_per_second']:,.0f} beside {row['none']['images_per_second']:,.0f} images/s"
    return f"{rates}, {row['ratio']:.2f}x; compiled in {row[name]['setup_s']:.0f} s"


def reason(name: str, row: dict[str, Any]) -> str:
    """Why a part costs more than a tenth; nothing where it does not."""
    return WHY.get(name, "not known") if row["ratio"] < SHARE else ""


def as_table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    made = [row for row in report["rows"].values() if "failed" not in row]
    machines = sorted({f"one {row['device']}, torch {row['torch']}" for row in made})
    lines = [
        "# Parts in a ViT of 24 blocks and 192 channels, beside none",
        "",
        f"Made by `python benchmarks/parts.py --output results/parts` on {'; '.join(machines)}: a training step of "
        f"{BATCH} images of 224 pixels as `fathoms train` runs it (bfloat16 working copy, compiled blocks, CUDA "
        "graph), part and plain ViT in turns in one process. Multiplications are those of `flop_count`. Reasons are "
        "read off what a part reads and writes, not off a profile.",
        "",
        "| part | options | images/s | none, images/s | ratio | peak memory, ratio | multiplications, ratio "
        "| why, where it costs more than a tenth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed']} |")
            continue
        options = " ".join(f"`{key}={value}`" for key, value in row["options"].items())
        rates = [f"{row[side]['images_per_second']:,.0f}" for side in (name, "none")]
        memory = "–" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}"
        cells = [
            name,
            options,
            *rates,
            f"{row['ratio']:.2f}",
            memory,
            f"{row['multiplications_ratio']:.2f}",
        ]
        lines.append("| " + " | ".join([*cells, reason(name, row)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the rows, each saved as it ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(PARTS), help="which parts; default: all")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md after every row")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a tiny ViT on a CPU, to see that it works")
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("no CUDA device; run this where there is one, or with --tiny")
    device = "CPU" if arguments.tiny else torch.cuda.get_device_name()
    report = load_report(arguments.output)
    plain = contender("none", {}, arguments.tiny)
    for name in arguments.rows or PARTS:
        began = time.perf_counter()
        try:
            row = {"device": device, "torch": torch.__version__, **measure(name, plain, arguments)}
        except (RuntimeError, fathoms.FathomsError) as error:
            row = {"failed": " ".join(str(error).split())[:300]}
        report["rows"][name] = row
        print(f"{name}: {as_line(name, row)} [{time.perf_counter() - began:.0f} s]", flush=True)
        # The compiler is not reset: the plain ViT's graph replays the code that it made.
        gc.collect()
        if not arguments.tiny:
            torch.cuda.empty_cache()
        save_report(report, arguments.output, as_table)


if __name__ == "__main__":
    main()
