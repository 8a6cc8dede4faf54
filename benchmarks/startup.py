"""Start-up of a run, phase by phase: `python benchmarks/startup.py cifar10.npz --before old.json --output new.json`.

Runs of `fathoms train` in new processes, with the compile caches empty and then full, and full without torch's pool of
compile workers; about 80 s on one GPU. `--all` adds the same with empty caches, kernels chosen by timing, runs that
are not compiled, and two in one process. Without DATA it makes images of CIFAR-10's sizes. `--device cpu --epochs 1`
shows what does not depend on the GPU. Before the runs it times the imports alone. `--before` compares with an earlier
output, whose rows are kept under "before". Where torch was installed without the byte code that pip makes, every run
would compile its source again; byte code is then kept in a folder of this benchmark. Words after `--` go to every run.
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
NO_WORKERS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


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


IMPORTS = """
import gc, importlib, json, os, sys, time
if sys.argv[1] == "off":
    gc.disable()
began, seconds = time.perf_counter(), {}
for name in ("torch", "fathoms.train.loop", "torch._dynamo", "torch._inductor.compile_fx"):
    importlib.import_module(name)
    seconds[name] = time.perf_counter() - began
    began = time.perf_counter()
cached = importlib.util.cache_from_source(sys.modules["torch._dynamo"].__file__)
print(json.dumps({**seconds, "byte code is cached": os.path.exists(cached)}))
"""


def measure_imports(environment: dict[str, str]) -> dict[str, Any]:
    """Seconds of the imports of a compiled run in a new process, with garbage collection and without."""
    found = {}
    for collection in ("on", "off"):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS, collection],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        found[f"collection {collection}"] = json.loads(done.stdout)
    return found


def keep_byte_code(imports: dict[str, Any], folder: Path) -> dict[str, str]:
    """The environment in which new processes find the byte code of earlier ones, where the installation holds none."""
    cached = all(row["byte code is cached"] for row in imports.values())
    return {} if cached else {"PYTHONPYCACHEPREFIX": str(folder / "byte_code"), "PYTHONDONTWRITEBYTECODE": ""}


def runs_of(folder: Path, every: bool) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """Name, further flags and environment of each run."""
    kinds = ("rules", "timing", "alone")
    rules, timing, alone = ({"TORCHINDUCTOR_CACHE_DIR": str(folder / kind)} for kind in kinds)
    runs: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "first, caches empty": ((), rules),
        "second, caches full": ((), rules),
        "caches full, no compile workers": ((), {**rules, **NO_WORKERS}),
    }
    if every:
        runs |= {
            "caches empty, no compile workers": ((), {**alone, **NO_WORKERS}),
            "not compiled": (("--torchcompile", "none"), {}),
            "kernels by timing, caches empty": ((), {**timing, **BY_TIMING}),
            "kernels by timing, caches full": ((), {**timing, **BY_TIMING}),
        }
    return runs


def measure(arguments: argparse.Namespace, more: Sequence[str]) -> dict[str, Any]:
    """All runs, with `more` flags for each; what is there is written after each."""
    report: dict[str, Any] = {}
    if arguments.before is not None:
        earlier = json.loads(arguments.before.read_text())
        report["before"] = {name: row for name, row in earlier.items() if name != "before"}
    report["imports"] = measure_imports({})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        byte_code = keep_byte_code(report["imports"], folder)
        if byte_code:
            measure_imports(byte_code)
            report["imports, byte code kept"] = measure_imports(byte_code)
        print(
            json.dumps({key: value for key, value in report.items() if key != "before"}, indent=1),
            file=sys.stderr,
        )
        data = arguments.data
        if data is None:
            data = str(folder / "images.npz")
            write_images(Path(data))
        words = (data, *RUN, "--epochs", str(arguments.epochs), "--device", arguments.device, *more)
        for number, (name, (own, environment)) in enumerate(runs_of(folder, arguments.all).items()):
            report[name] = train((*words, *own), folder / "runs", str(number), {**byte_code, **environment})
            print(describe(name, report[name]), file=sys.stderr, flush=True)
            save(report, arguments.output)
        if arguments.all:
            environment = {**byte_code, "TORCHINDUCTOR_CACHE_DIR": str(folder / "rules")}
            report["to the first update, twice in one process"] = measure_twice(
                words, folder / "twice", environment
            )
    return report


def save(report: dict[str, Any], path: Path | None) -> None:
    """Write what has been measured so far."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def compare(report: dict[str, Any]) -> str:
    """A line for each run that was measured before too: first update, wall clock, and what follows the report."""
    lines = []
    for name, then in report.get("before", {}).items():
        now = report.get(name)
        if not (isinstance(then, dict) and isinstance(now, dict) and "phases" in then and "phases" in now):
            continue
        first = [row["phases"]["first update"]["ended"] for row in (then, now)]
        exits = [row["wall"] - row["phases"]["report"]["ended"] for row in (then, now)]
        lines.append(
            f"{name}: first update {first[0]:.1f} -> {first[1]:.1f} s, wall clock {then['wall']:.1f} -> "
            f"{now['wall']:.1f} s, exit {exits[0]:.1f} -> {exits[1]:.1f} s"
        )
    return "\n".join(lines)


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
    parser.add_argument("--before", type=Path, help="an earlier output to compare with")
    parser.add_argument("--all", action="store_true", help="further runs: about three minutes more")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--twice", type=Path, help=argparse.SUPPRESS)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, more = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if arguments.twice is not None:
        return twice(more, arguments.twice)
    report = measure(arguments, more)
    save(report, arguments.output)
    print(compare(report), file=sys.stderr)
    if arguments.json:
        print(json.dumps(report))
    return None


if __name__ == "__main__":
    main()
