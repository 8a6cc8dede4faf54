"""How well the probe's verdict on the start predicts 300 real updates: run the grid, fit on one half, score the other.

    python benchmarks/probe_calibration.py run --data cifar10.npz --output results/probe_calibration.json
    python benchmarks/probe_calibration.py score results/probe_calibration.json

The grid is 24 switches x depth 24 and 48 x two learning rates, AdamW without warm-up. Each cell is probed at
initialisation and after ten steps, then trained for 300 updates. Its outcome is "diverges" if the loss did not stay
finite or ended above where it began, "stalls" if the mean of the last 30 losses is within 0.25 nats of chance,
"trains" otherwise. Switches at even places of the list set the thresholds; the others score them. The file is
written after every cell.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from fathoms.files.atomic import write_atomic
from mps import mps

CHANCE = math.log(10)
STALLED = 0.25
LAST = 30
DEPTHS, RATES = (24, 48), (1e-3, 4e-3)

PRE: dict[str, Any] = {}
POST = {"attn_placement": "post", "mlp_placement": "post"}
RES_POST = {"attn_placement": "res_post", "mlp_placement": "res_post"}
PRE_POST = {"attn_placement": "pre_post", "mlp_placement": "pre_post"}

SWITCHES: dict[str, dict[str, Any]] = {
    "layernorm": PRE,
    "rmsnorm": {"norm": "rmsnorm"},
    "layernorm post": POST,
    "rmsnorm post": {"norm": "rmsnorm", **POST},
    "layernorm res-post": RES_POST,
    "layernorm pre-post": PRE_POST,
    "dyt": {"norm": "dyt"},
    "derf": {"norm": "derf"},
    "no norm": {"norm": "none"},
    "no norm, rezero from one": {"norm": "none", "residual": "rezero", "residual_init": 1.0},
    "no norm, rezero": {"norm": "none", "residual": "rezero"},
    "no norm, skipinit": {"norm": "none", "residual": "skipinit"},
    "no norm, fixup": {"norm": "none", "residual": "fixup"},
    "no norm, tfixup": {"norm": "none", "residual": "tfixup"},
    "learnable scaler": {"norm": "learnable_scaler"},
    "learnable scaler, layerscale": {"norm": "learnable_scaler", "residual": "layerscale"},
    "layerscale": {"residual": "layerscale"},
    "layerscale from one": {"residual": "layerscale", "residual_init": 1.0},
    "rezero from one": {"residual": "rezero", "residual_init": 1.0},
    "skipinit": {"residual": "skipinit"},
    "deepnorm": {"residual": "deepnorm", **POST},
    "layernorm scaling": {"residual": "layernorm_scaling"},
    "dyt, layerscale": {"norm": "dyt", "residual": "layerscale"},
    "no norm, skipinit from one": {"norm": "none", "residual": "skipinit", "residual_init": 1.0},
}


def cell(task: dict[str, Any]) -> dict[str, Any]:
    """Probe one cell at initialisation and after ten steps, then train it."""
    import torch

    from fathoms import ViT, ViTConfig
    from fathoms.probes.first_steps import take_first_steps
    from fathoms.probes.signal import probe
    from fathoms.probes.verdicts.start_features import start_features

    torch.set_num_threads(task["threads"])
    images, labels = _data(task["data"], task["device"])
    shape = {"image_size": images.shape[-1], "in_channels": images.shape[1], "num_classes": 10}
    shape |= {"patch_size": images.shape[-1] // task["grid"], "dim": task["dim"], "heads": task["dim"] // 32}
    torch.manual_seed(task["seed"])
    model = ViT(ViTConfig(**shape, depth=task["depth"], **SWITCHES[task["switch"]])).to(task["device"])
    batch = task["batch_size"]
    began = time.monotonic()
    initial = probe(model, images[:64], labels[:64])
    steps = take_first_steps(model, images, labels, lambda m: _adamw(m, task["lr"]), batch_size=batch)
    features = start_features(initial, steps.after, steps.losses)
    features["nonfinite"] = float(steps.after is None or not all(map(math.isfinite, steps.losses)))
    probed = time.monotonic() - began
    losses = _train(model, images, labels, task)
    kept = {key: task[key] for key in ("switch", "depth", "lr", "seed")}
    return kept | {
        "outcome": outcome(losses),
        "features": features,
        "losses": [round(loss, 4) if math.isfinite(loss) else None for loss in losses[::5]],
        "last": _finite(sum(losses[-LAST:]) / LAST),
        "probe_seconds": round(probed, 2),
        "seconds": round(time.monotonic() - began, 2),
    }


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


@functools.cache
def _data(path: str, device: str) -> Any:
    """Images and labels, once for each process."""
    import numpy as np
    import torch

    if path == "digits":
        from fathoms.data.sources.digits import digits

        images, labels = digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        return images[order].to(device), labels[order].to(device)
    arrays = np.load(path)
    labels = arrays["y_train"]
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = torch.from_numpy(arrays["x_train"][order]).permute(0, 3, 1, 2).to(device)
    mean, std = (
        torch.tensor(x, device=device)[:, None, None] for x in ((0.491, 0.482, 0.447), (0.247, 0.244, 0.262))
    )
    return (pixels.float() / 255 - mean) / std, torch.from_numpy(labels[order]).long().to(device)


def _adamw(model: Any, lr: float) -> Any:
    from fathoms import param_groups
    from fathoms.train.optim.build import build_optimizer

    return build_optimizer(param_groups(model, 0.05), "adamw", lr=lr)


def _train(model: Any, images: Any, labels: Any, task: dict[str, Any]) -> list[float]:
    """300 updates at a constant learning rate; bfloat16 autocast on a GPU. It ends where a loss is not finite."""
    import torch
    import torch.nn.functional as F

    optimizer = _adamw(model.train(), task["lr"])
    cuda, batch = task["device"] == "cuda", task["batch_size"]
    found: list[Any] = []
    for update in range(task["updates"]):
        rows = torch.arange(update * batch, (update + 1) * batch, device=images.device) % len(images)
        with torch.autocast(task["device"], dtype=torch.bfloat16, enabled=cuda):
            logits = model(images[rows])
        loss = F.cross_entropy(logits.float(), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
        # The device is asked every 25 updates, so that it is not waited for at each.
        if update % 25 == 24 and not math.isfinite(found[-1].item()):
            break
    losses = torch.stack(found).tolist()
    return losses + [math.nan] * (task["updates"] - len(losses))


def outcome(losses: list[float]) -> str:
    """Of one run: trains, stalls or diverges."""
    last = sum(losses[-LAST:]) / LAST
    if not math.isfinite(last) or last > max(losses[0], CHANCE) + 0.1:
        return "diverges"
    return "stalls" if last > CHANCE - STALLED else "trains"


def tasks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cell, in an order by lot: what is done when the time is over is then a fair sample."""
    common = {
        key: getattr(args, key) for key in ("data", "device", "dim", "grid", "batch_size", "updates", "seed")
    }
    common["threads"] = max(1, args.threads)
    planned = [
        {"switch": switch, "depth": depth, "lr": lr, **common}
        for depth in args.depths
        for lr in args.lrs
        for switch in SWITCHES
    ]
    random.Random(0).shuffle(planned)
    return planned


def run(args: argparse.Namespace) -> None:
    """Run the grid in several processes; the file always holds every cell that is done."""
    began = time.monotonic()
    planned, done = tasks(args), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        # Small kernels of many processes take turns on a GPU, unless MPS lets them run side by side.
        shares = args.device == "cuda" and stack.enter_context(mps(Path(scratch)))
        print(
            f"{len(planned)} cells, {args.processes} processes, MPS {'on' if shares else 'off'}", flush=True
        )
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(args.processes))
        results = pool.imap_unordered(cell, planned)
        for number in range(1, len(planned) + 1):
            left = args.minutes * 60 - (time.monotonic() - began)
            try:
                row = results.next(timeout=max(left, 0.01))
            except multiprocessing.TimeoutError:
                print(f"the time is over after {len(done)} cells", flush=True)
                break
            except Exception as error:  # noqa: BLE001
                # One cell that fails, for want of memory say, leaves the others.
                print(f"{number:3}/{len(planned)} failed: {error}", flush=True)
                continue
            done.append(row)
            write(args.output, planned, done, time.monotonic() - began)
            print(
                f"{number:3}/{len(planned)} {row['outcome']:9} {row['last']} {row['switch']}, "
                f"depth {row['depth']}, lr {row['lr']:g}, {row['seconds']:.0f} s",
                flush=True,
            )
        pool.terminate()


def write(path: str, planned: list[dict[str, Any]], done: list[dict[str, Any]], seconds: float) -> None:
    """The file with the cells in the grid's order."""
    kept = sorted(done, key=lambda row: (list(SWITCHES).index(row["switch"]), row["depth"], row["lr"]))
    about = {"planned": len(planned), "done": len(kept), "seconds": round(seconds, 1)}
    about |= {key: value for key, value in planned[0].items() if key not in ("switch", "depth", "lr", "data")}
    write_atomic(Path(path), (json.dumps({"about": about, "cells": kept}) + "\n").encode())


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run the grid")
    runner.add_argument("--data", default="digits", help="an .npz with x_train and y_train, or digits")
    runner.add_argument("--output", default="results/probe_calibration.json")
    runner.add_argument("--device", default="cuda")
    runner.add_argument("--processes", type=int, default=12)
    runner.add_argument("--threads", type=int, default=1)
    runner.add_argument("--minutes", type=float, default=5.5, help="stop then, with what is done")
    runner.add_argument("--dim", type=int, default=96)
    runner.add_argument("--grid", type=int, default=8, help="patches along a side")
    runner.add_argument("--batch-size", type=int, default=128)
    runner.add_argument("--updates", type=int, default=300)
    runner.add_argument("--seed", type=int, default=0)
    runner.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    runner.add_argument("--lrs", type=float, nargs="+", default=list(RATES))
    scorer = commands.add_parser("score", help="set the thresholds on one half, score them on the other")
    scorer.add_argument("results")
    scorer.add_argument("--table", help="write the table to this Markdown file")
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        from probe_calibration_score import score

        score(args.results, args.table)


if __name__ == "__main__":
    main()
