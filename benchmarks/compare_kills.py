"""SIGKILLs at random moments of a comparison: its results must be those of an undisturbed one, bit for bit.

    python benchmarks/compare_kills.py --kills 10 --out results/compare_kills.json

A comparison of four tiny models on two workers, each tuned over three rates, looked at after 3 and 4 seeds, of which
the best one goes on after 3, is killed again and again (its whole process group, its parent alone, or one worker) and
given again, until it has ended; then results.json is compared with that of the same comparison left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = (
    *("--axis", "norm=layernorm,dyt", "--axis", "residual=none,rezero", "--jobs", "2"),
    *("--seeds", "3,4", "--keep-arms", "1@3", "--baseline", "norm=layernorm, residual=none"),
    *("--tune", "lr=1e-3,3e-3,9e-3"),
    *("--depth", "2", "--dim", "16", "--heads", "2", "--epochs", "4", "--warmup-epochs", "0"),
    *("--batch-size", "96", "--recovery-interval", "5", "--device", "cpu"),
)
KINDS = ("group", "parent", "worker")
ENDED = 100
"""Attempts after which the comparison should have ended."""


def command(folder: Path) -> list[str]:
    """The comparison in a folder."""
    place = ("--output", str(folder.parent), "--experiment", folder.name)
    return [sys.executable, "-m", "fathoms", "compare", *WORDS, *place]


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The comparison as a process in a session of its own, its output in a log."""
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command(folder), stdout=log, stderr=log, start_new_session=True)


def workers_of(pid: int) -> list[int]:
    """The children of a process."""
    try:
        return [int(word) for task in Path(f"/proc/{pid}/task").iterdir()
                for word in (task / "children").read_text().split()]  # fmt: skip
    except OSError:
        return []


def kill(process: subprocess.Popen[bytes], kind: str, rng: random.Random) -> bool:
    """Kill as `kind` says; False where there was nothing to kill."""
    workers = workers_of(process.pid)
    if process.poll() is not None or not workers:
        return False
    victims = {"group": [process.pid, *workers], "parent": [process.pid], "worker": [rng.choice(workers)]}
    for victim in victims[kind]:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return False
    return True


def rows_of(folder: Path) -> list[Path]:
    """The measurements of every run and trial that was begun."""
    return [*folder.glob("tuning/*/metrics.jsonl"), *folder.glob("cells/*/metrics.jsonl")]


def states(folder: Path) -> tuple[int, int]:
    """Cells that ended, and cells that were begun and have not."""
    begun = [path.parent for path in rows_of(folder)]
    done = [run for run in begun if (run / "summary.json").is_file()]
    return len(done), len(begun) - len(done)


def is_training(folder: Path, since: float) -> bool:
    """Whether a cell has written a row since a time."""
    return any(path.stat().st_mtime > since for path in rows_of(folder))


def disturbed(folder: Path, kills: int, seed: int, span: float) -> list[dict[str, object]]:
    """Run the comparison to its end through kills at random moments; each kill with what it met."""
    rng, met = random.Random(seed), list[dict[str, object]]()
    for _ in range(ENDED):
        process, since = start(folder), time.time()
        while process.poll() is None and len(met) < kills:
            # A kill is to meet runs under way, not the start of Python.
            while process.poll() is None and not is_training(folder, since):
                time.sleep(0.05)
            time.sleep(rng.uniform(0.0, span))
            kind = KINDS[len(met) % len(KINDS)]
            if kill(process, kind, rng):
                ended, cut = states(folder)
                met.append({"kind": kind, "cells_ended": ended, "cells_cut": cut})
            since = time.time()
        if process.wait() == 0:
            return met
    raise SystemExit("the comparison did not end")


def main() -> int:
    """Run both, compare, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--span", type=float, default=4.0, help="most seconds from a run's first row to a kill"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        alone, killed = Path(scratch) / "alone", Path(scratch) / "killed"
        began = time.monotonic()
        if start(alone).wait() != 0:
            raise SystemExit((Path(scratch) / "alone.log").read_text()[-2000:])
        undisturbed = time.monotonic() - began
        met = disturbed(killed, args.kills, args.seed, args.span)
        files = [(folder / "results.json").read_bytes() for folder in (alone, killed)]
        results = json.loads(files[0])
        rows = results["cells"]
        tried = json.loads((alone / "tuning.json").read_text())["arms"]
    result = {
        "command": f"python benchmarks/compare_kills.py --kills {args.kills} --seed {args.seed}",
        "cells": len(rows),
        "statuses": {status: sum(row["status"] == status for row in rows) for status in {r["status"] for r in rows}},
        "trials": sum(len(arm["trials"]) for arm in tried),
        "arms_dropped": sum(arm["dropped"] for arm in results["arms"]),
        "kills": met,
        "seconds_undisturbed": round(undisturbed, 1),
        "seconds_disturbed": round(time.monotonic() - began - undisturbed, 1),
        "sha256": [hashlib.sha256(file).hexdigest() for file in files],
        "equal": files[0] == files[1],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0 if result["equal"] and len(met) == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
