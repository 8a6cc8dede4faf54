"""Fuzz every reader of untrusted files: recipes, checkpoints, images, archives, arrays.

    python benchmarks/fuzz.py --cases 100000 --json

Each case takes a good file, damages it (bits, bytes, pieces, numbers and values that readers trip over) and opens it
as the library would. It may be read or refused with a `FathomsError`; anything else is a finding: another exception,
a crash of the process, a case of more than five seconds, a stray file, memory beyond the limit. Case N of a
target is the same on every machine: `--only TARGET --first N --cases 1` repeats it.

Cases run in a child process, two thousand at a time, so that a crash is counted and named and the rest still runs.

Exit status: 0 nothing was found, 1 something was.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import faulthandler
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from fathoms import FathomsError

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_targets import TARGETS

CHUNK = 2000
HANG = 5.0
# What a child may take beyond what it holds when it starts.
ROOM = 2 << 30
# What is noted before the first case.
BEFORE = b"\xff" * 8


class HangError(BaseException):
    """A case that takes too long; no reader's `except Exception` catches it."""


def files_below(folder: Path) -> set[str]:
    """Every path below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def run_cases(name: str, first: int, count: int, seed: int, base: Path, note: Path) -> dict[str, Any]:
    """Run some cases of one target in this process."""
    work, empty = base / "work", base / "empty"
    for folder in (work, empty):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    os.chdir(empty)
    target = TARGETS[name](work)
    # The undamaged file is read, or the mutants of it would prove nothing.
    target.read(target.good)
    expected = files_below(work)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, held + ROOM))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report: dict[str, Any] = {"accepted": 0, "refused": 0, "findings": [], "slowest": 0.0}
    with note.open("r+b", buffering=0) as place:
        for case in range(first, first + count):
            place.seek(0)
            place.write(struct.pack("<Q", case))
            outcome, seconds = run_case(target, random.Random(f"{seed}/{name}/{case}"))
            report["slowest"] = max(report["slowest"], seconds)
            if outcome in ("accepted", "refused"):
                report[outcome] += 1
            elif len(report["findings"]) < 20:
                report["findings"].append({"target": name, "case": case, "what": outcome})
    for stray in sorted(
        (files_below(work) - expected) | {f"(current folder) {n}" for n in files_below(empty)}
    ):
        report["findings"].append({"target": name, "case": first, "what": f"stray file {stray}"})
    report["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    report["grown_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return report


def run_case(target: Any, rng: random.Random) -> tuple[str, float]:
    """One case: accepted, refused, or what went wrong; and how long it took."""
    data = target.make(rng)
    faulthandler.dump_traceback_later(6 * HANG, exit=True)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    began, outcome = time.perf_counter(), "accepted"
    try:
        target.read(data)
    except FathomsError as error:
        outcome = "refused" if str(error).isprintable() and str(error) else f"no printable line: {error!r}"
    except HangError:
        outcome = f"hang: more than {HANG} s"
    # Anything but a refusal is a finding.
    except BaseException as error:  # noqa: BLE001
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome = f"{type(error).__name__} at {where}: {str(error)[:160]}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    return outcome, time.perf_counter() - began


def _too_long(_number: int, _frame: Any) -> None:
    raise HangError


NONE = {"accepted": 0, "refused": 0, "findings": [], "slowest": 0.0, "peak_mb": 0, "grown_mb": 0}


def in_child(name: str, first: int, count: int, seed: int, base: Path) -> dict[str, Any]:
    """Run some cases in a child; where it dies, the case is a finding, and those around it run in children anew."""
    if count < 1:
        return NONE
    note, output = base / "note", base / "output"
    note.write_bytes(BEFORE)
    output.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, _too_long)
            warnings.simplefilter("ignore")
            output.write_text(json.dumps(run_cases(name, first, count, seed, base, note)))
            code = 0
        # A forked child prints its error and leaves by os._exit.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return json.loads(output.read_text())
    if note.read_bytes() == BEFORE:
        raise RuntimeError(f"{name}: the undamaged file cannot be read; see the error above")
    (case,) = struct.unpack("<Q", note.read_bytes())
    died = {**NONE, "findings": [{"target": name, "case": case, "what": f"the process ended with {status}"}]}
    earlier = in_child(name, first, case - first, seed, base)
    return both(both(earlier, died), in_child(name, case + 1, first + count - case - 1, seed, base))


def both(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Counts and findings added up, of the rest the larger."""
    added = ("accepted", "refused", "findings")
    return {key: a[key] + b[key] if key in added else max(a[key], b[key]) for key in NONE}


def main() -> int:
    """Share the cases among the targets, run them, print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="in all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing new after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--only", choices=tuple(TARGETS), default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args()
    names = [args.only] if args.only else list(TARGETS)
    share = -(-args.cases // len(names))
    # In memory where that can be had: a file that is written a hundred thousand times wears a disk out.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    base, home = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory)), Path.cwd()
    began, cases, report = time.monotonic(), {}, NONE
    try:
        for name in names:
            cases[name] = {"cases": 0, "accepted": 0, "refused": 0}
            for first in range(args.first, args.first + share, CHUNK):
                if time.monotonic() - began > args.seconds:
                    break
                count = min(CHUNK, args.first + share - first)
                own = in_child(name, first, count, args.seed, base)
                cases[name]["cases"] += count
                for key in ("accepted", "refused"):
                    cases[name][key] += own[key]
                report = both(report, own)
            print(
                f"{name}: {cases[name]}, {len(report['findings'])} findings so far",
                file=sys.stderr,
                flush=True,
            )
    finally:
        os.chdir(home)
        shutil.rmtree(base, ignore_errors=True)
    kinds = [finding["what"].partition(" ")[0] for finding in report["findings"]]
    hangs, stray = kinds.count("hang:"), kinds.count("stray")
    result: dict[str, Any] = {
        "cases": sum(counts["cases"] for counts in cases.values()),
        "seed": args.seed,
        "targets": cases,
        "hangs": hangs,
        "stray_files": stray,
        "crashes": len(kinds) - hangs - stray,
        "findings": report["findings"][:50],
        "peak_memory_mb": report["peak_mb"],
        "memory_grown_mb": report["grown_mb"],
        "slowest_case_seconds": round(report["slowest"], 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result) if args.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
