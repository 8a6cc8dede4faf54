"""Comparisons on one GPU: the overhead of a cell, cells that share the GPU, one that does not fit, workers renewed.

    python benchmarks/compare_gpu.py cifar10.npz --output results/compare_gpu.json

About five minutes on an H200. `--only cells`, `share` or `memory` runs one part and keeps it beside those that the
output holds; `share`, 1 and 4 workers on the GPU under MPS, takes about 90 seconds. `--device cpu` shows on a few
images that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fathoms.cli.main import main as fathoms
from fathoms.compare.workers import runner
from mps import mps

BASE = (
    *("--recipe", "cifar", "--dim", "192", "--heads", "3", "--depth", "12", "--opt", "adamw"),
    *("--weight-decay", "0.05", "--position", "learned", "--qk-norm", "none", "--warmup-epochs", "0"),
)
FAST = ("--precision", "bf16", "--torchcompile", "inductor", "--compile-scope", "blocks", "--launch", "graph")
EAGER = ("--precision", "bf16", "--torchcompile", "none", "--launch", "graph")
TINY = (
    *("--recipe", "digits", "--image-size", "16", "--patch-size", "4", "--dim", "16", "--heads", "2"),
    *("--depth", "1", "--batch-size", "32", "--warmup-epochs", "0", "--device", "cpu"),
)
STARTED: list[dict[str, float]] = []


class TimedWorker(runner.Worker):
    """A worker whose start, cells and idle time between them are counted."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.row = {"cells": 0, "idle": 0.0}
        self.free: float | None = None
        STARTED.append(self.row)

    def ask(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """Give it a cell."""
        if self.free is not None:
            self.row["idle"] += time.monotonic() - self.free
        self.row["cells"] += 1
        result = super().ask(task)
        self.free = time.monotonic()
        return result


def compare(root: Path, name: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Run one comparison: exit code, seconds, its files, and its workers."""
    STARTED.clear()
    said, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(said):
        code = fathoms(["compare", *words, "--output", str(root), "--experiment", name])
    seconds = time.monotonic() - began
    folder = root / name
    files = {
        file: json.loads((folder / f"{file}.json").read_text())
        for file in ("results", "timings")
        if (folder / f"{file}.json").is_file()
    }
    if "results" not in files:
        raise SystemExit(said.getvalue()[-2000:])
    print(said.getvalue()[-1500:], file=sys.stderr)
    return {"code": code, "seconds": seconds, "workers": [dict(row) for row in STARTED], **files}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    numbers = {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
    return {name: round(value, 2) for name, value in numbers.items()}


def rates(made: dict[str, Any]) -> list[float]:
    """Images per second of each cell's last epoch."""
    return [row["images_per_second"] for row in made["timings"].values() if row["images_per_second"]]


def cells(root: Path, data: str, tiny: bool) -> dict[str, Any]:
    """24 cells, 2 architectures x 4 lr x 3 seeds, 3 epochs: what a cell costs beside its training."""
    words = TINY if tiny else (*BASE, *FAST)
    axes = ("--axis", "residual=none,layerscale", "--axis", "lr=3e-4,1e-3,2e-3,4e-3", "--seeds", "3")
    made = compare(root, "cells", (data, *words, *axes, "--epochs", "3", *(("--jobs", "1") if tiny else ())))
    timings = list(made["timings"].values())
    beside = [row["wall_seconds"] - row["training_seconds"] for row in timings]
    # The first cell of an architecture compiles; the two slowest are these.
    usual = sorted(beside)[:-2]
    return {
        "cells": len(timings),
        "exit_code": made["code"],
        "seconds": round(made["seconds"], 1),
        "training_seconds": spread([row["training_seconds"] for row in timings]),
        "beside_training_seconds": spread(usual),
        "first_of_architecture_seconds": [round(value, 2) for value in sorted(beside)[-2:]],
        "idle_between_cells_seconds": round(
            sum(row["idle"] for row in made["workers"]) / max(1, len(timings) - 1), 3
        ),
        "workers": len(made["workers"]),
        "images_per_second": spread(rates(made)),
        "aimed_at_seconds": 3.0,
    }


def share(root: Path, data: str, tiny: bool) -> dict[str, Any]:
    """8 cells of one architecture, one at a time and four at a time: images per second of all together."""
    words = TINY if tiny else (*BASE, *EAGER, "--depth", "8")
    axes = ("--axis", "lr=3e-4,1e-3,2e-3,4e-3", "--seeds", "2", "--epochs", "2")
    found: dict[str, Any] = {}
    for count in (1, 4):
        with mps(root / f"mps-{count}") if count > 1 else contextlib.nullcontext(False) as runs:
            slots = ("--jobs", str(min(count, 2))) if tiny else ("--per-gpu", str(count))
            made = compare(root, f"share-{count}", (data, *words, *axes, *slots))
        found[f"per_gpu_{count}"] = {
            "mps": runs,
            "exit_code": made["code"],
            "seconds": round(made["seconds"], 1),
            "images_per_second_together": round(count * statistics.median(rates(made))),
        }
    one, four = (found[f"per_gpu_{count}"]["images_per_second_together"] for count in (1, 4))
    same = [json.dumps(json.loads((root / f"share-{n}/results.json").read_text())["cells"]) for n in (1, 4)]
    return found | {"gain": round(four / one, 2), "equal_results": same[0] == same[1]}


def memory(root: Path, data: str, tiny: bool) -> dict[str, Any]:
    """Two arms, one of which does not fit on the GPU: it fails, the other ends; workers are renewed."""
    words = TINY if tiny else (*BASE, *EAGER, "--dim", "384", "--heads", "6")
    # On a CPU nothing is short of memory: there the renewal after some cells is all that is shown.
    large = "large: lr=2e-3" if tiny else "large: batch_size=40000"
    arms = (
        "--arm",
        "fits: lr=1e-3",
        "--arm",
        large,
        "--seeds",
        "2",
        "--epochs",
        "1",
        *(("--jobs", "1") if tiny else ()),
    )
    before, runner.CELLS_PER_WORKER = runner.CELLS_PER_WORKER, 2
    try:
        made = compare(root, "memory", (data, *words, *arms))
    finally:
        runner.CELLS_PER_WORKER = before
    rows = made["results"]["cells"]
    return {
        "exit_code": made["code"],
        "seconds": round(made["seconds"], 1),
        "statuses": {f"{row['name']}, seed {row['seed']}": row["status"] for row in rows},
        "reasons": sorted({row["reason"][:160] for row in rows if row["reason"]}),
        "cells_of_each_worker": [row["cells"] for row in made["workers"]],
    }


PARTS = {"cells": cells, "share": share, "memory": memory}


def main() -> int:
    """Run the parts and keep their numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="CIFAR-10 as an .npz file")
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runner.Worker = TimedWorker
    began, kept = time.monotonic(), dict[str, Any]()
    kept["command"] = "python benchmarks/compare_gpu.py " + " ".join(["DATA", *sys.argv[2:]])
    with tempfile.TemporaryDirectory() as scratch:
        for name, part in PARTS.items():
            if args.only in (None, name):
                kept[name] = part(Path(scratch), args.data, args.device == "cpu")
                print(json.dumps({name: kept[name]}), flush=True)
    kept |= {"seconds": round(time.monotonic() - began), "python": platform.python_version(), **machine()}
    if args.output:
        # One part is kept beside the others that are there.
        earlier = json.loads(args.output.read_text()) if args.only and args.output.is_file() else {}
        named = {args.only: kept.get(args.only)} if earlier else kept
        args.output.write_text(json.dumps({**earlier, **named}, indent=1) + "\n")
    print(json.dumps(kept))
    return 0


def machine() -> dict[str, Any]:
    """The GPU and torch's version."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
