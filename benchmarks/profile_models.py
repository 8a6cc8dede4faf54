"""Where the microseconds of a training update go: `python benchmarks/profile_models.py --output results/profiles`.

Each model trains as `fathoms bench` does, and torch's profiler counts the kernels of a few updates by kind. Beside each
kind stands its floor: products of linears and attention at the matrix rate that this GPU reaches, everything else by
the bytes that must move at its copy rate. "between kernels" is the time in which no kernel runs. About three and a half
minutes on one GPU with empty compile caches; written after every model. `--device cpu --tiny` runs small models where
there is no GPU, and counts operations instead of kernels.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fathoms
from fathoms.bench.race import Setting, prepare, seconds
from fathoms.models.vit import ViT
from result_rows import load_report, save_report
from timing import device_limits

MODELS = {
    "vit_small": ("vit_small_patch16_224", 256),
    "vit_base": ("vit_base_patch16_224", 256),
    "vit_192x36": ("vit_layernorm_embed_dim192_patch16_head3_depth36", 256),
    "cait_s24_224": ("cait_s24_224", 256),
    "cait_s24_384": ("cait_s24_384", 64),
    "cait_m36_384": ("cait_m36_384", 16),
}
TINY: dict[str, Any] = {"depth": 2, "dim": 64, "heads": 4, "image_size": 32, "num_classes": 10}
UPDATES = 5
GAP, OTHER = "between kernels", "other"
# The first pattern that matches a kernel's name decides; inductor's kernels are named after all operations near them.
# Products of attention without a fused kernel are gemms too.
ELEMENT_WISE = "norms, residuals, activations"
KINDS = (
    (ELEMENT_WISE, r"^triton_(poi|per|red|for|split)_|gelu"),
    ("attention", r"flash|fmha|attention|sdpa|^(mix|outer|inner)_|softmax"),
    ("products", r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|bmm|addmm|::mm|^triton_(tem|mm)|conv"),
    ("optimizer", r"multi_tensor|adam|foreach|lpnorm|newton"),
    ("copies and casts", r"memcpy|memset|copy|cat|fill|transpose"),
    (ELEMENT_WISE, r"norm|elementwise|reduce|add|mul"),
)
# Bytes that an AdamW update of one parameter must move: the gradient cast up (2 + 4) and read for its norm (4), the
# step itself (weight, both moments read and written, the gradient read: 28), the weight cast down (4 + 2).
BYTES_PER_PARAMETER = 44


def kind_of(name: str) -> str:
    """The kind of a kernel, from its name.

    >>> kind_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"), kind_of("triton_per_fused_add_native_layer_norm_3")
    ('products', 'norms, residuals, activations')
    """
    lower = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), OTHER)


def kernels(run: Callable[[], object], cuda: bool, updates: int = UPDATES) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel of a few runs; on a CPU, of each operation by itself."""
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        for _ in range(updates):
            run()
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        return [(event.name, event.self_cpu_time_total) for event in recorded.events()]
    on_device = torch.autograd.DeviceType.CUDA
    # Ranges that were given names span kernels, which would count twice.
    found = [
        (event.name, event.time_range.elapsed_us())
        for event in recorded.events()
        if event.device_type == on_device and not event.is_user_annotation
    ]
    if not found:
        raise RuntimeError("the profiler saw no kernel; CUPTI may be missing or in use")
    return found


def floors(model: ViT, batch: int, limits: dict[str, float]) -> dict[str, float]:
    """Microseconds that an update cannot take less than, by kind.

    A backward pass has twice the products of a forward pass. Element-wise work, in bfloat16: a residual addition with
    its norm reads two and writes two tensors of the stream, its backward pass the same; an activation reads and writes
    the hidden channels, its backward pass reads two and writes one.
    """
    config = model.config
    products = 6.0 * model.flop_count() * batch / (limits["matrix_tflops"] * 1e6)
    tokens = batch * (model.grid**2 + config.registers + 1)
    per_block = 2 * tokens * config.dim * (2 * (4 + 4) + config.mlp_ratio * (2 + 3))
    element_wise = config.depth * per_block / (limits["copy_tbps"] * 1e6)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    update = BYTES_PER_PARAMETER * parameters / (limits["copy_tbps"] * 1e6)
    return {
        "products and attention": products,
        "norms, residuals, activations": element_wise,
        "optimizer and casts": update,
    }


def measure(
    name: str, batch: int, device: torch.device, limits: dict[str, float], tiny: bool
) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    model = fathoms.create_model(name, **(TINY if tiny else {}))
    cuda, config = device.type == "cuda", model.config
    least = floors(model, batch, limits)
    images = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
    labels = torch.randint(0, config.num_classes, (batch,), device=device)
    setting = Setting() if cuda else Setting("fp32", "none", "eager")
    contender = prepare(name, model, images, labels, "train", setting)
    wall = 1e6 * seconds(contender.run, 10 if cuda else 2)
    return {"batch": batch, "wall_us": wall, "floors": least, **summarise(kernels(contender.run, cuda), wall)}


def summarise(events: Iterable[tuple[str, float]], wall: float, updates: int = UPDATES) -> dict[str, Any]:
    """Microseconds of an update by kind, and its longest kernels."""
    kinds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    times: defaultdict[str, float] = defaultdict(float)
    for name, took in events:
        kinds[kind_of(name)] += took / updates  # pyrefly: ignore
        calls[name] += 1
        times[name] += took / updates
    kinds[GAP] = max(0.0, wall - sum(kinds.values()))  # pyrefly: ignore
    longest = sorted(times, key=times.__getitem__, reverse=True)[:12]
    return {
        "kinds": dict(kinds.most_common()),
        "kernels": sum(calls.values()) / updates,
        "longest": [{"name": key, "us": times[key], "calls": calls[key] / updates} for key in longest],
    }


def excess(row: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Measured microseconds beside the floor, in the groups that have one."""
    kinds = row["kinds"]
    groups = {
        "products and attention": ("products", "attention"),
        "norms, residuals, activations": ("norms, residuals, activations",),
        "optimizer and casts": ("optimizer", "copies and casts"),
        OTHER: (OTHER,),
        GAP: (GAP,),
    }
    return {
        group: (sum(kinds.get(kind, 0.0) for kind in own), row["floors"].get(group))
        for group, own in groups.items()
    }


def as_table(report: dict[str, Any]) -> str:
    """All rows as Markdown."""
    lines = [
        "# Where the microseconds of a training update go",
        "",
        "Made by `python benchmarks/profile_models.py --output results/profiles`. Floors: products at the measured "
        "matrix rate, all else by the bytes that must move at the measured copy rate; time between kernels has none.",
    ]
    for name, row in report["rows"].items():
        if "failed" in row:
            lines += ["", f"## {name}", "", f"failed: {row['failed']}"]
            continue
        lines += ["", f"## {name}, batch {row['batch']}: {row['wall_us']:,.0f} µs", ""]
        lines += [
            f"{row['kernels']:,.0f} kernels an update, on one {row['device']}, torch {row['torch']}.",
            "",
            "| kind | µs | share | floor, µs | over the floor, µs |",
            "|---|---|---|---|---|",
        ]
        for group, (took, floor) in excess(row).items():
            limit = ["", ""] if floor is None else [f"{floor:,.0f}", f"{took - floor:,.0f}"]
            share = f"{took / row['wall_us']:.0%}".replace("%", " %")
            lines.append(f"| {group} | {took:,.0f} | {share} | {limit[0]} | {limit[1]} |")
        lines += ["", "| kernel | µs | calls |", "|---|---|---|"]
        lines += [
            f"| {each['name'][:90]} | {each['us']:,.0f} | {each['calls']:g} |" for each in row["longest"]
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Profile each model, and save after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="two narrow blocks and batch 2, to try the script"
    )
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md after every model")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one, or with --device cpu --tiny")
    limits = device_limits() if cuda else {"matrix_tflops": 0.05, "copy_tbps": 0.01}
    where = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, **limits}
    report = load_report(arguments.output)
    for key in arguments.models:
        name, batch = MODELS[key]
        began = time.perf_counter()
        try:
            batch = 2 if arguments.tiny else batch
            report["rows"][key] = where | measure(name, batch, device, limits, arguments.tiny)
        except (RuntimeError, fathoms.FathomsError) as error:
            report["rows"][key] = {"failed": " ".join(str(error).split())[:300]}
        save_report(report, arguments.output, as_table)
        shown = report["rows"][key].get("kinds", report["rows"][key])
        print(f"{key}: {shown} [{time.perf_counter() - began:.0f} s]", flush=True)
        torch.compiler.reset()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
