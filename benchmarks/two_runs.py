"""Several trainings at once on one machine's CPU: `python benchmarks/two_runs.py`, three minutes.

Trains the digits alone and then several times at once, in processes of their own: as `fathoms train` sets its
threads, with one thread, and with --spinning with threads that spin while they wait (the default of OpenMP), which
takes several times as long. Each training prints a line when it ends. The table has the seconds of training, and the
share that each run gets of what it is entitled to: if runs ask for more threads than there are cores, n runs take n
times as long, and a share of 1 is just that. Rounds are interleaved, numbers are medians; no round begins that would
not end within --seconds. Other work on the machine lowers all of them; the load before each setting is in the table,
which is written to results/two_runs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fathoms.machine.cores import compute_threads, usable_cores
from fathoms.text_table import plural

RESULTS = Path(__file__).resolve().parent.parent / "results" / "two_runs.json"
SETTINGS: dict[str, dict[str, str]] = {
    "as fathoms sets it": {},
    "spinning": {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "200"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def train_at_once(count: int, epochs: int, settings: dict[str, str], limit: float) -> float:
    """Seconds of training of `count` runs at once: the mean over them; longer than `limit` seconds is an error."""
    until = time.monotonic() + limit
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
            codes = [run.wait(max(0.1, until - time.monotonic())) for run in runs]
            if any(codes):
                sys.exit("a training failed; run `fathoms train --epochs 1` to see why")
        except subprocess.TimeoutExpired:
            sys.exit(f"{plural(count, 'training')} did not end within {limit:.0f} s; give fewer --epochs")
        finally:
            for run in runs:
                run.kill()
                run.wait()
        found = [json.loads(path.read_text())["seconds"] for path in Path(folder).glob("*/summary.json")]
    return statistics.mean(found)


def measure(runs: int, epochs: int, rounds: int, seconds: float, spinning: bool) -> list[dict[str, Any]]:
    """One row for each setting, from as many rounds as there is time for."""
    chosen = {name: given for name, given in SETTINGS.items() if spinning or name != "spinning"}
    times: dict[str, dict[int, list[float]]] = {name: {1: [], runs: []} for name in chosen}
    loads: dict[str, list[float]] = {name: [] for name in chosen}
    began, longest = time.monotonic(), 0.0
    for number in range(1, rounds + 1):
        start = time.monotonic()
        if start - began + longest > seconds:
            say(f"round {number} and later are left out: they would not end within {seconds:.0f} s")
            break
        for name, given in chosen.items():
            loads[name].append(os.getloadavg()[0])
            for count in (1, runs):
                took = train_at_once(count, epochs, given, seconds)
                times[name][count].append(took)
                at_once = "alone" if count == 1 else f"{count} at once"
                say(f"round {number} of {rounds}, {name}, {at_once}: {took:.1f} s of training")
        longest = max(longest, time.monotonic() - start)
    return [
        row_of(name, given, runs, times[name], statistics.median(loads[name]))
        for name, given in chosen.items()
    ]


def row_of(
    name: str, given: dict[str, str], runs: int, times: dict[int, list[float]], load: float
) -> dict[str, Any]:
    """The row of a setting: medians, and the share of what a run is entitled to."""
    alone, together = (statistics.median(times[count]) for count in (1, runs))
    threads = int(given.get("OMP_NUM_THREADS", compute_threads()))
    entitled = alone * max(1.0, runs * threads / usable_cores())
    row = {
        "setting": name,
        "threads": threads,
        "rounds": len(times[1]),
        "alone_s": alone,
        "together_s": together,
    }
    return row | {"share": entitled / together, "load_before": load}


def say(line: str) -> None:
    """Print a line on how far it is; standard output is for the table."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Print the table, or JSON, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2, help="trainings at once")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; medians are shown")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="time in which the last round has to end"
    )
    parser.add_argument("--spinning", action="store_true", help="add the slow setting")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: the folder does not exist")
    rows = measure(args.runs, args.epochs, args.rounds, args.seconds, args.spinning)
    command = shlex.join(["python", "benchmarks/two_runs.py", *sys.argv[1:]])
    table = {
        "command": command,
        "cores": usable_cores(),
        "runs": args.runs,
        "epochs": args.epochs,
        "rows": rows,
    }
    args.output.write_text(json.dumps(table, indent=1) + "\n")
    if args.json:
        print(json.dumps(table))
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
