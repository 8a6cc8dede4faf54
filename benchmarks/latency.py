"""Latency of one request, for people who serve: `python benchmarks/latency.py --output results/latency`.

The median and the 99th percentile of single calls at batch 1, 8 and 64, each waited for, in bfloat16: plain models,
accelerated ones (`fathoms.accelerate`) and folded ones (`fathoms.fold`), each run eagerly, with its blocks compiled,
compiled and replayed as one CUDA graph, and as the torch.export program that `fathoms export --format torch-export`
writes. Saved after every
measurement; begins nothing new after `--limit` seconds, and says what is missing. About three minutes on one GPU.
`--device cpu --tiny` tries the script where there is none.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fathoms
from fathoms.models.build_timm import build_timm
from fathoms.train.precision.compile import compile_blocks
from fathoms.train.precision.compile_cache import compile_repeatably
from fathoms.train.precision.cuda_graph import GraphedStep
from result_rows import load_report, save_report

BATCHES = (1, 8, 64)
SCALER = "vit_learnable_scaler_embed_dim192_patch16_head3_depth36"
SMALL: dict[str, Any] = {"depth": 2, "image_size": 32}
CAIT = "timm cait_s24_224"
NARROW = "ViT 192x36 LearnableScaler"


def plain_cait(tiny: bool) -> nn.Module:
    """The CaiT of timm, which people have."""
    if tiny:
        import timm

        return timm.create_model("cait_xxs24_224", depth=2, img_size=32)
    return build_timm("cait_s24_224", 1000, cudnn_attention=True)


def plain_narrow(tiny: bool) -> nn.Module:
    """A deep, narrow ViT with a scale in place of each norm; uneven scales give folding something to do."""
    torch.manual_seed(0)
    return fathoms.create_model(SCALER, norm_init="normal", **(SMALL if tiny else {}))


def accelerated(model: nn.Module) -> nn.Module:
    """The model, its modules replaced by faster ones."""
    fathoms.accelerate(model)
    return model


def folded(model: nn.Module) -> nn.Module:
    """The model with its scales folded into the matrices."""
    return fathoms.fold(model.eval())[0]


MODELS: dict[
    tuple[str, str], tuple[Callable[[bool], nn.Module], tuple[Callable[[nn.Module], nn.Module], ...]]
] = {
    (CAIT, "plain"): (plain_cait, ()),
    (CAIT, "accelerated"): (plain_cait, (accelerated,)),
    (NARROW, "plain"): (plain_narrow, ()),
    (NARROW, "folded"): (plain_narrow, (folded,)),
    (NARROW, "folded, accelerated"): (plain_narrow, (folded, accelerated)),
}


def build(key: tuple[str, str], device: torch.device, tiny: bool) -> nn.Module:
    """A model in inference on a device; what changes it sees float32, the device it runs on, then bfloat16."""
    make, changes = MODELS[key]
    model = make(tiny).eval().to(device)
    for change in changes:
        model = change(model).to(device)
    return model.eval().requires_grad_(False).to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def exported(model: nn.Module, images: Tensor) -> Callable[[Tensor], Any]:
    """The program of a model for any batch."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    return torch.export.export(model, (images,), dynamic_shapes=({0: batch},), strict=False).module()


def forms(model: nn.Module, images: Tensor) -> Iterator[tuple[str, Callable[[], Callable[[Tensor], Any]]]]:
    """Name and maker of each way to run a model."""

    def compiled() -> nn.Module:
        own = copy.deepcopy(model)
        compile_blocks(own, dynamic=False)
        return own

    def replayed() -> Callable[[Tensor], Any]:
        own = compiled()
        return GraphedStep(lambda images: (own(images),), [])

    yield "eager", lambda: model
    yield "compiled", compiled
    if images.is_cuda:
        yield "compiled, CUDA graph", replayed
    yield "exported", lambda: exported(model, images)


@torch.no_grad()
def latencies(
    run: Callable[[Tensor], Any], images: Tensor, least: int = 100, most_s: float = 1.0
) -> list[float]:
    """Milliseconds of single calls, each waited for: at least 100, unless they take too long."""
    cuda = images.is_cuda
    for _ in range(5):
        run(images)
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < least or time.perf_counter() - began < most_s / 2:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(images)
        if cuda:
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
        if time.perf_counter() - began > most_s and len(found) >= 20:
            break
    return found


def summarise(times: list[float]) -> dict[str, float]:
    """Median, 99th percentile and number of calls.

    >>> summarise([1.0] * 99 + [5.0])["p50_ms"]
    1.0
    """
    return {
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "calls": len(times),
    }


def as_table(report: dict[str, Any]) -> str:
    """All rows as Markdown."""
    rows = report["rows"]
    where = sorted({f"one {row['device']}, torch {row['torch']}" for row in rows.values()})
    lines = [
        "# Latency of single calls",
        "",
        f"Made by `python benchmarks/latency.py --output results/latency` on {'; '.join(where)}. Milliseconds, "
        "median / 99th percentile, each call waited for.",
        "",
        "| model | form | run as | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |",
        "|---|---|---|" + "---|" * len(BATCHES),
    ]
    for row in rows.values():
        cells = []
        for batch in BATCHES:
            own = row["batches"].get(str(batch))
            cells.append(
                "not measured"
                if own is None
                else f"failed: {own['failed'][:60]}"
                if "failed" in own
                else f"{own['p50_ms']:.2f} / {own['p99_ms']:.2f}"
            )
        lines.append(f"| {row['model']} | {row['form']} | {row['run']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure(report: dict[str, Any], arguments: argparse.Namespace, ended: Callable[[], bool]) -> list[str]:
    """Fill in the rows; returns the names of those that time did not allow."""
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    where = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
    missing: list[str] = []
    for key in MODELS:
        if ended():
            missing.append(", ".join(key))
            continue
        model = build(key, device, arguments.tiny)
        size = 32 if arguments.tiny else 224
        images = torch.randn(max(BATCHES), 3, size, size, device=device, dtype=next(model.parameters()).dtype)
        for name, make in forms(model, images[:2]):
            label = ", ".join((*key, name))
            row: dict[str, Any] = {**where, "model": key[0], "form": key[1], "run": name, "batches": {}}
            report["rows"][label] = row
            fill(row["batches"], make, images, ended)
            if len(row["batches"]) < len(BATCHES):
                missing.append(label)
            save_report(report, arguments.output, as_table)
            print(f"{label}: {row['batches']}", flush=True)
        torch.compiler.reset()
        gc.collect()
    return missing


def fill(
    cells: dict[str, Any],
    make: Callable[[], Callable[[Tensor], Any]],
    images: Tensor,
    ended: Callable[[], bool],
) -> None:
    """Measure one way to run a model at each batch size; what cannot run says why."""
    try:
        run = make()
        for batch in BATCHES:
            if ended():
                return
            cells[str(batch)] = summarise(latencies(run, images[:batch]))
    # Export and compilation fail in many ways, and the other rows still count.
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split())[:200]
        cells |= {str(batch): {"failed": reason} for batch in BATCHES if str(batch) not in cells}


def main() -> None:
    """Measure within the limit of time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which nothing new begins")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md after every measurement")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one, or with --device cpu --tiny")
    began = time.perf_counter()
    compile_repeatably()
    report = load_report(arguments.output)
    missing = measure(report, arguments, lambda: time.perf_counter() - began > arguments.limit)
    if missing:
        print(f"not measured within {arguments.limit:.0f} s: {'; '.join(missing)}")


if __name__ == "__main__":
    main()
