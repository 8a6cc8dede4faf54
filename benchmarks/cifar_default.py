"""`fathoms train cifar10.npz --recipe cifar --val-share 0`, the rest at its defaults: images/s and accuracy over seeds.

    python benchmarks/cifar_default.py cifar10.npz --output results/cifar_default.json

Runs of all 50,000 training images, each in a new process; accuracy is that of the last weights on
the test split. The rate is the median over the epochs after the first, which compiles. About 70 s for each of three
seeds on an H200; written after each. Words after `--` go to every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL = {"images_per_second": 30_000.0, "top1": 90.0}


def train(data: str, seed: int, folder: Path, more: list[str]) -> dict[str, Any]:
    """One run: its wall clock, rate, accuracy, and the speed that it chose."""
    words = [data, "--recipe", "cifar", "--val-share", "0", "--seed", str(seed), *more]
    where = ["--output", str(folder), "--experiment", f"seed{seed}"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fathoms", "train", *words, *where],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"seed {seed} failed: {done.stderr[-2000:]}")
    wall = time.monotonic() - began
    said = [line for line in done.stderr.splitlines() if line.startswith("speed:")]
    return {"seed": seed, "wall": wall, "speed": said, **read_run(folder / f"seed{seed}")}


def read_run(folder: Path) -> dict[str, Any]:
    """The rate of the epochs after the first, the accuracy, the epochs and the seconds of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [row["images_per_second"] for row in rows if row["split"] == "train"]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "images_per_second": statistics.median(rates[1:] or rates),
        "top1": summary["test"]["top1"],
        "epochs": summary["epoch"],
        "seconds": summary["seconds"],
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread of the accuracy, the slowest rate, and whether both goals are reached."""
    top1 = [run["top1"] for run in runs]
    rate = min(run["images_per_second"] for run in runs)
    mean = statistics.mean(top1)
    return {
        "runs": runs,
        "top1": mean,
        "top1_sd": statistics.stdev(top1) if len(top1) > 1 else None,
        "images_per_second": rate,
        "goal": GOAL,
        "reached": mean >= GOAL["top1"] and rate >= GOAL["images_per_second"],
    }


def main() -> None:
    """Train with each seed, and write the summary after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, more = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(arguments.seeds):
            runs.append(train(arguments.data, seed, Path(scratch), more))
            print(json.dumps(runs[-1]), flush=True)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps({**summarise(runs), "words": more}, indent=1) + "\n")
    print(json.dumps({**summarise(runs), "runs": None}))


if __name__ == "__main__":
    main()
