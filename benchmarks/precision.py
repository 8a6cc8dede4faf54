"""Accuracy of the fast precision policy against full precision: `python benchmarks/precision.py cifar10.npz --json`.

Trains the same small ViT under both policies, several seeds each, all at once on one device, and compares the held-out
accuracies. Everything but the policy is equal; `--precision bf16` is the fast one. Words after `--` go to every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

POLICIES = ("bf16", "autocast_fp32_stream")
CIFAR = {
    **{"image-size": "32", "patch-size": "4", "dim": "192", "heads": "3", "depth": "6", "readout": "mean"},
    **{"batch-size": "1024", "lr": "0.001", "warmup-epochs": "2", "clip-grad": "1", "sched-on-updates": ""},
    **{"crop": "pad", "crop-pct": "1", "mean": "0.4914 0.4822 0.4465", "std": "0.247 0.2435 0.2616"},
}


def main() -> None:
    """Train with each policy and seed, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", nargs="?", help="CIFAR-10 as `fathoms train` reads it; without it, the digits"
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--output", type=Path, help="write the JSON there")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:cut])
    arguments.words = words[cut + 1 :]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        cells = [(policy, seed) for policy in POLICIES for seed in seeds]
        top1 = list(pool.map(lambda cell: train(arguments, Path(folder), *cell), cells))
    report = compare(
        {policy: top1[i * arguments.seeds :][: arguments.seeds] for i, policy in enumerate(POLICIES)}
    )
    report |= {
        "data": Path(arguments.data or "digits").name,
        "epochs": arguments.epochs,
        "words": arguments.words,
    }
    report["seconds"] = time.perf_counter() - began
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if arguments.json else as_text(report))


def train(arguments: argparse.Namespace, folder: Path, policy: str, seed: int) -> float:
    """The validation accuracy of one run, in a separate process."""
    epochs = str(arguments.epochs)
    options = {} if arguments.data is None else dict(CIFAR)
    options |= {"epochs": epochs, "eval-interval": epochs, "precision": policy, "seed": str(seed)}
    options |= {"output": str(folder), "experiment": f"{policy}-{seed}"}
    words = [] if arguments.data is None else [arguments.data]
    words += [word for name, value in options.items() for word in (f"--{name}", *value.split())]
    words += arguments.words
    done = subprocess.run(
        [sys.executable, "-m", "fathoms", "train", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{policy}, seed {seed}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    summary = json.loads((folder / f"{policy}-{seed}" / "summary.json").read_text())
    top1 = summary["last"]["top1"]
    print(f"{policy}, seed {seed}: {top1:.2f} %", file=sys.stderr, flush=True)
    return top1


def compare(accuracies: dict[str, list[float]]) -> dict[str, Any]:
    """Means and standard deviations by policy, and whether the means are that close; None if one seed has no spread."""
    report: dict[str, Any] = {
        policy: {
            "top1": top1,
            "mean": statistics.mean(top1),
            "sd": statistics.stdev(top1) if len(top1) > 1 else None,
        }
        for policy, top1 in accuracies.items()
    }
    fast, plain = (report[policy] for policy in POLICIES)
    difference = fast["mean"] - plain["mean"]
    spread = None if fast["sd"] is None else max(fast["sd"], plain["sd"])
    within = None if spread is None else abs(difference) <= spread
    return {**report, "difference": difference, "within_one_sd": within}


def as_text(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{policy}: {report[policy]['mean']:.2f} % (sd {report[policy]['sd']})" for policy in POLICIES]
    verdicts = {
        True: "within one standard deviation",
        False: "outside one standard deviation",
        None: "of one seed each: no verdict",
    }
    return "\n".join([*lines, f"difference {report['difference']:+.2f}, {verdicts[report['within_one_sd']]}"])


if __name__ == "__main__":
    main()
