"""Score the verdict of `fathoms probe`, which fifty updates give, on 300 updates of real runs.

    python benchmarks/probe_score.py run cifar10.npz --jobs 8 --seconds 500   # goes on where it stopped
    python benchmarks/probe_score.py score                                    # writes results/probe_score.{json,md}

The rule has no threshold that was fitted: the last ten losses are below, at or above what guessing by class shares has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
UPDATES, BATCH, IMAGES = 300, 32, 4096
SWITCHES: dict[str, dict[str, Any]] = {
    "layernorm": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "scaler, normal": {"norm": "learnable_scaler", "norm_init": "normal"},
    "scaler, ones": {"norm": "learnable_scaler", "norm_init": "ones"},
    "dyt": {"norm": "dyt"},
    "derf": {"norm": "derf"},
    "no norm": {"norm": "none"},
    "no norm, fixup": {"norm": "none", "residual": "fixup"},
    "no norm, rezero": {"norm": "none", "residual": "rezero"},
    "post-norm": {"attn_placement": "post", "mlp_placement": "post"},
    "pre-post": {"attn_placement": "pre_post", "mlp_placement": "pre_post"},
    "layerscale": {"residual": "layerscale"},
    "tfixup": {"residual": "tfixup"},
    "completep": {"residual": "completep", "base_depth": 12},
    "talking heads": {"attention": "talking_heads"},
    "class attention, qk norm": {"readout": "class_attention", "qk_norm": "rmsnorm"},
}
DEPTHS, RATES, DATA = (12, 36), (1e-4, 1e-3, 1e-2), ("digits", "cifar10")


def cells() -> list[tuple[str, int, float, str]]:
    """The grid in an order that is no order, so that any beginning of it is a fair sample."""
    every = list(itertools.product(SWITCHES, DEPTHS, RATES, DATA))
    random.Random(0).shuffle(every)
    return every


def images_of(name: str, path: Path | None) -> tuple[Any, Any, int]:
    """Images, labels and patch size of a data set."""
    import numpy as np
    import torch

    if name == "digits":
        from fathoms.data.sources.arrays import digits

        images, labels = digits(8, 3)
        return images, labels, 2
    with np.load(str(path)) as arrays:
        images, labels = arrays["x_train"][:IMAGES], arrays["y_train"][:IMAGES]
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return (x - 0.47) / 0.25, torch.from_numpy(labels.astype(np.int64)), 8


def train(cell: tuple[str, int, float, str], path: Path | None) -> dict[str, Any]:
    """The losses of one cell."""
    import torch

    from fathoms.models.config import ViTConfig
    from fathoms.models.vit import ViT
    from fathoms.probes import take_first_steps

    switch, depth, lr, data = cell
    images, labels, patch = images_of(data, path)
    begun = time.perf_counter()
    torch.manual_seed(0)
    shape = {"image_size": images.shape[-1], "patch_size": patch, "dim": 32, "heads": 2, "num_classes": 10}
    model = ViT(ViTConfig(**{**shape, "depth": depth, "readout": "mean", **SWITCHES[switch]}))
    steps = take_first_steps(model, images, labels, lr=lr, steps=UPDATES, batch_size=BATCH)
    losses = [None if loss != loss or loss == float("inf") else round(loss, 4) for loss in steps.losses]
    return {
        "switch": switch,
        "depth": depth,
        "lr": lr,
        "data": data,
        "losses": losses,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def work(file: Path, path: Path | None, share: int, jobs: int, seconds: float) -> None:
    """One worker: its share of the cells that are not there yet, until the time is up."""
    end = time.monotonic() + seconds
    done = {key_of(row) for row in rows_of(file)}
    for cell in cells()[share::jobs]:
        if cell in done:
            continue
        if time.monotonic() > end:
            return
        row = train(cell, path)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def key_of(row: dict[str, Any]) -> tuple[str, int, float, str]:
    """The cell of a row."""
    return row["switch"], row["depth"], row["lr"], row["data"]


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The cells that have ended."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def main() -> int:
    """Run or score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "work", "score"])
    parser.add_argument("data", nargs="?", type=Path, help="CIFAR-10 as an .npz")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no cell begins")
    parser.add_argument("--file", type=Path, default=Path("runs/probe_score.jsonl"), help="rows as they end")
    arguments = parser.parse_args()
    if arguments.what == "work":
        work(arguments.file, arguments.data, arguments.share, arguments.jobs, arguments.seconds)
        return 0
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    same = [str(arguments.data), "--file", str(arguments.file), "--seconds", str(arguments.seconds)]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "work", *same, "--jobs", str(arguments.jobs), "--share", str(share)],
            env=own,
        )
        for share in range(arguments.jobs)
    ]
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
