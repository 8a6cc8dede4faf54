"""Several trainings at once on one machine's CPU: `python benchmarks/two_runs.py --runs 2 --epochs 6`.

Trains the digits alone and then several times at once, in processes of their own: as `fathoms train` sets its
threads, with threads that spin while they wait (the default of OpenMP), and with one thread. The table has the
seconds of training, and the share that each run gets of what it is entitled to: if runs ask for more threads than
there are cores, n runs take n times as long, and a share of 1 is just that. Rounds are interleaved, numbers are
medians. Other work on the machine lowers all of them; the load before each setting is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fathoms.machine.cores import compute_threads, usable_cores
from fathoms.text_table import plural

SETTINGS: dict[str, dict[str, str]] = {
    "as fathoms sets it": {},
    "spinning": {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "200"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def train_at_once(count: int, epochs: int, settings: dict[str, str]) -> float:
    """Seconds of training of `count` runs at once: the mean over them."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "MKL_"))
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "fathoms", "train", "--epochs", str(epochs), "--device", "cpu"]
        runs = [
            subprocess.Popen(
                [*words, "--output", folder, "--experiment", f"run{number}"],
                env={**kept, **settings},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for number in range(count)
        ]
        try:
            codes = [run.wait() for run in runs]
            if any(codes):
                raise SystemExit("a training failed; run `fathoms train --epochs 1` to see why")
        finally:
            for run in runs:
                run.kill()
        found = [json.loads(path.read_text())["seconds"] for path in Path(folder).glob("*/summary.json")]
    return statistics.mean(found)


def measure(runs: int, epochs: int, rounds: int, spinning: bool) -> list[dict[str, Any]]:
    """One row for each setting."""
    chosen = {name: given for name, given in SETTINGS.items() if spinning or name != "spinning"}
    times: dict[str, dict[int, list[float]]] = {name: {1: [], runs: []} for name in chosen}
    loads: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, given in chosen.items():
            loads[name].append(os.getloadavg()[0])
            for count in (1, runs):
                times[name][count].append(train_at_once(count, epochs, given))
    rows = []
    for name, given in chosen.items():
        alone, together = (statistics.median(times[name][count]) for count in (1, runs))
        threads = int(given.get("OMP_NUM_THREADS", compute_threads()))
        entitled = alone * max(1.0, runs * threads / usable_cores())
        row = {"setting": name, "threads": threads, "alone_s": alone, "together_s": together}
        rows.append(row | {"share": entitled / together, "load_before": statistics.median(loads[name])})
    return rows


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2, help="trainings at once")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; medians are shown")
    parser.add_argument("--skip-spinning", action="store_true", help="leave out the slow setting")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rows = measure(args.runs, args.epochs, args.rounds, not args.skip_spinning)
    if args.json:
        print(json.dumps({"cores": usable_cores(), "runs": args.runs, "epochs": args.epochs, "rows": rows}))
        return
    size = f"{plural(args.epochs, 'epoch')}, {plural(args.rounds, 'round')}"
    print(f"{plural(usable_cores(), 'core')}, {args.runs} runs at once, {size}\n")
    print(f"| setting | threads | alone | {args.runs} at once, each | share of its fair part | load before |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['setting']} | {row['threads']} | {row['alone_s']:.1f} s | {row['together_s']:.1f} s "
            f"| {row['share']:.2f} | {row['load_before']:.1f} |"
        )


if __name__ == "__main__":
    main()
