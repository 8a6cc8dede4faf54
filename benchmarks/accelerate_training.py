"""Training of timm's CaiT, accelerated, beside timm's compiled one: `python benchmarks/accelerate_training.py`.

The update of `fathoms train` around timm's model with its blocks compiled, in the quicker of torch.compile's modes,
and around the same model after `fathoms.accelerate`, in the ways that it can be run: under autocast, launched kernel by
kernel or as a CUDA graph, and as a graph with bfloat16 copies of the weights, cast once an update. All are raced in one
process; two minutes for cait_s24_224 on one GPU, saved after each model. `--device cpu --tiny` tries the script.
"""

from __future__ import annotations

import argparse
import functools
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from fathoms.bench.accelerated import prepare_accelerated
from fathoms.bench.beside_timm import TIMM_SETTINGS, prepare_modes, quicker
from fathoms.bench.race import Setting, race
from fathoms.models.build_timm import build_timm
from result_rows import load_report, save_report

RESULTS = Path(__file__).parents[1] / "results" / "accelerate_training"
MODELS = {"cait_s24_224": 256, "cait_s24_384": 64, "cait_xxs24_224": 256}
WAYS = {
    "autocast, launched": Setting("autocast", "blocks", "eager", "lean"),
    "autocast, graph": Setting("autocast", "blocks", "graph", "lean"),
    "bf16 copies, graph": Setting("bf16", "blocks", "graph", "lean"),
}
GOAL = {"ratio": 2.0, "memory_ratio": 0.55}


def make_model(name: str, tiny: bool) -> nn.Module:
    """One of timm's models; a small one to try the script."""
    if tiny:
        return timm.create_model("cait_xxs24_224", depth=2, img_size=32)
    return build_timm(name, 1000, cudnn_attention=True)


def without_gpu(setting: Setting) -> Setting:
    """The same where there is neither a compiler's time nor a graph."""
    return replace(setting, compile="none", launch="eager")


def measure(name: str, batch: tuple[Tensor, Tensor], tiny: bool) -> dict[str, Any]:
    """All ways beside timm, in turns."""
    make = functools.partial(make_model, name, tiny)
    on_gpu = batch[0].is_cuda
    theirs = replace(TIMM_SETTINGS["train"], compile="blocks")
    contenders, failed = prepare_modes(
        "timm", make, batch, "train", theirs if on_gpu else without_gpu(theirs)
    )
    wrong: dict[str, str] = {}
    for way, setting in WAYS.items():
        try:
            own, _ = prepare_accelerated(make, batch, "train", setting if on_gpu else without_gpu(setting))
            if own is not None:
                own.name = way
                contenders.append(own)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            wrong[way] = " ".join(str(error).split())[:300]
    rows = race(contenders, len(batch[0]), turns=4 if on_gpu else 1, steps=4 if on_gpu else 1)
    best = quicker(rows, "timm", failed)
    ways: dict[str, Any] = {way: rows[way] for way in WAYS if way in rows}
    for row in ways.values():
        row["ratio"] = row["images_per_second"] / best["images_per_second"]
        row["memory_ratio"] = row["peak_gib"] / best["peak_gib"] if row["peak_gib"] else None
    return {"batch": len(batch[0]), "timm": best, **ways, "failed": wrong, "goal": GOAL}


def main() -> None:
    """Measure each model, and save after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["cait_s24_224"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--output", type=Path, default=RESULTS, help="OUTPUT.json")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one, or with --device cpu --tiny")
    where = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
    report = load_report(arguments.output)
    for name in arguments.models:
        count, size = (2, 32) if arguments.tiny else (MODELS[name], int(name[-3:]))
        torch.manual_seed(0)
        images = torch.randn(count, 3, size, size, device=arguments.device)
        labels = torch.randint(0, 1000, (count,), device=arguments.device)
        report["rows"][name] = {**where, **measure(name, (images, labels), arguments.tiny)}
        save_report(report, arguments.output)
        print(name, report["rows"][name], flush=True)
        torch.compiler.reset()
        gc.collect()


if __name__ == "__main__":
    main()
