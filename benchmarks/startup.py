"""The start of a training run, phase by phase: `python benchmarks/startup.py cifar10.npz --output startup.json`.

Runs of `fathoms train` in new processes, with the compile caches empty and then full, with kernels chosen by rules and
by timing, compiled and not, and twice in one process. Without DATA it makes images of CIFAR-10's sizes. A few minutes
on one GPU; `--device cpu --epochs 1` shows what does not depend on the GPU. Words after `--` go to every run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODEL = ("--image-size", "32", "--patch-size", "4", "--dim", "192", "--heads", "3", "--depth", "12")
RUN = ("--recipe", "cifar", *MODEL, "--val-share", "0", "--profile-start")
BY_TIMING = {"TORCHINDUCTOR_DETERMINISTIC": "0"}


def write_images(path: Path) -> None:
    """50,000 and 10,000 images of 32 x 32 in ten classes, compressed; smooth, so that they compress as photos do."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", 50_000), ("test", 10_000)):
        coarse = rng.integers(0, 200, (count, 8, 8, 3), dtype=np.uint8)
        noise = rng.integers(0, 40, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"x_{split}"] = coarse.repeat(4, 1).repeat(4, 2) + noise
        arrays[f"y_{split}"] = rng.integers(0, 10, count)
    np.savez_compressed(path, **arrays)


def train(words: Sequence[str], folder: Path, name: str, environment: dict[str, str]) -> dict[str, Any]:
    """One run in a new process: its wall clock, its phases, its rate."""
    command = [
        sys.executable,
        "-m",
        "fathoms",
        "train",
        *words,
        "--output",
        str(folder),
        "--experiment",
        name,
    ]
    began = time.monotonic()
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    wall = time.monotonic() - began
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"failed": done.stderr.strip().splitlines()[-1:] or [str(done.returncode)]}
    said = [line for line in done.stderr.splitlines() if line.startswith("speed:")]
    return {"wall": wall, "speed": said, **read_run(folder / name)}


def read_run(folder: Path) -> dict[str, Any]:
    """The phases of a run, and the images a second of its last epoch."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [row["images_per_second"] for row in rows if row["split"] == "train"]
    summary = json.loads((folder / "summary.json").read_text())
    start = json.loads((folder / "start.json").read_text())
    return {**start, "images_per_second": rates[-1], "training_seconds": summary["seconds"]}


def twice(words: Sequence[str], folder: Path) -> None:
    """Train twice in this process; prints the seconds to the first update of each, from its own start, as JSON."""
    from fathoms.cli.main import main
    from fathoms.train.record.start_profile import age_of_process

    seconds = []
    for number in range(2):
        began, name = age_of_process(), f"run{number}"
        out = ["--output", str(folder), "--experiment", name, "--seed", str(number)]
        if main(["train", *words, *out]):
            raise SystemExit(f"{name} failed")
        phases = json.loads((folder / name / "start.json").read_text())["phases"]
        seconds.append(phases["first update"]["ended"] - began)
    print(json.dumps(seconds))


def measure_twice(words: Sequence[str], folder: Path, environment: dict[str, str]) -> list[float] | str:
    """`twice` in a process of its own."""
    command = [sys.executable, __file__, "--twice", str(folder), "--", *words]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return done.stderr[-2000:] if done.returncode else json.loads(done.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace, more: Sequence[str]) -> dict[str, Any]:
    """All runs, with `more` flags for each."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = arguments.data
        if data is None:
            data = str(folder / "images.npz")
            write_images(Path(data))
        words = (data, *RUN, "--epochs", str(arguments.epochs), "--device", arguments.device, *more)
        caches = {kind: {"TORCHINDUCTOR_CACHE_DIR": str(folder / kind)} for kind in ("rules", "timing")}
        runs: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
            "first, caches empty": ((), caches["rules"]),
            "second, caches full": ((), caches["rules"]),
            "not compiled": (("--torchcompile", "none"), {}),
            "kernels by timing, caches empty": ((), {**caches["timing"], **BY_TIMING}),
            "kernels by timing, caches full": ((), {**caches["timing"], **BY_TIMING}),
        }
        for number, (name, (own, environment)) in enumerate(runs.items()):
            report[name] = train((*words, *own), folder / "runs", str(number), environment)
            print(describe(name, report[name]), file=sys.stderr, flush=True)
        report["to the first update, twice in one process"] = measure_twice(
            words, folder / "twice", caches["rules"]
        )
    return report


def describe(name: str, row: dict[str, Any]) -> str:
    """The printed lines of one run."""
    if "failed" in row:
        return f"{name}: failed ({row['failed']})"
    phases = ", ".join(f"{phase} {took['seconds']:.2f}" for phase, took in row["phases"].items())
    first = row["phases"]["first update"]["ended"]
    return (
        f"{name}: {row['wall']:.1f} s of wall clock, first update after {first:.1f} s, compiling "
        f"{row['compiling']:.1f} s, {row['images_per_second']:,.0f} images/s, {row['speed']}\n  {phases}"
    )


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--twice", type=Path, help=argparse.SUPPRESS)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, more = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if arguments.twice is not None:
        return twice(more, arguments.twice)
    report = measure(arguments, more)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(report))
    return None


if __name__ == "__main__":
    main()
