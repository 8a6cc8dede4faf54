"""Run the GPU tests side by side and keep a record of it: results/gpu_tests.json (commit, device, counts, seconds).

python benchmarks/gpu_record.py                       # what `make gpu` runs
python benchmarks/gpu_record.py --commit abc1234      # where the tree has no git folder
python benchmarks/gpu_record.py tests/ops --dry-run   # some of the tests, nothing written
python benchmarks/gpu_record.py --stale               # a line if the record is of other code (`make lint`)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "gpu_tests.json"
PROCESSES = 10
"""Most processes that share the GPU."""
WATCHED = ("training", "ops", "models", "parts", "data/augment", "surgery")
"""Folders of the package whose changes make the record old."""
ALLOWED = 100
"""Changed lines in those folders that the record still stands for."""


class Counter:
    """A pytest plugin that counts outcomes and keeps the names of failed tests."""

    def __init__(self) -> None:
        self.passed = self.skipped = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by the phase that ended it."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1


def git(*words: str) -> str | None:
    """Output of a git command; None if it fails."""
    try:
        return subprocess.check_output(
            ["git", *words], cwd=ROOT, text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str:
    """The commit that is checked out, with a plus if files differ from it."""
    name = git("rev-parse", "HEAD")
    return "unknown" if name is None else name + ("+" if git("status", "--porcelain", "-uno") else "")


def stale() -> str | None:
    """A line if the code of the GPU has changed since the record, or the record is not whole; else None."""
    record = json.loads(RECORD.read_text())
    if record["failed"]:
        return f"results/gpu_tests.json: {record['failed']} GPU tests failed; repair them and run `make gpu`"
    paths = [f"src/fathoms/{name}" for name in WATCHED]
    changes = git("diff", "--shortstat", record["commit"].rstrip("+"), "--", *paths)
    if changes is None:
        return f"results/gpu_tests.json: is of {record['commit'][:8]}, which is not here; run `make gpu`"
    lines = sum(map(int, re.findall(r"(\d+) (?:insertion|deletion)", changes)))
    if lines <= ALLOWED:
        return None
    return (
        f"results/gpu_tests.json: is of {record['commit'][:8]}; {lines:,} lines have changed in "
        f"{', '.join(WATCHED)} since; run `make gpu` where there is one"
    )


def main() -> int:
    """Run the tests; 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests")
    parser.add_argument("--commit", help="the commit of this tree, where git cannot say it")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--stale", action="store_true", help="run nothing; say whether the record is old")
    args = parser.parse_args()
    if args.stale:
        print(stale() or "results/gpu_tests.json: is of this code")
        return 0
    import pytest
    import torch

    if not torch.cuda.is_available():
        print("gpu_record: needs a CUDA device; CI has none, run it where there is one", file=sys.stderr)
        return 2
    counter, began = Counter(), time.monotonic()
    processes = min(PROCESSES, len(os.sched_getaffinity(0)))
    # Each test compiles and computes on one thread; their processes fill the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # pytest-benchmark warns beside xdist, and warnings are errors here.
    words = [*args.tests, "-m", "gpu or kernels", "-q", "-p", "no:benchmark", "--rootdir", str(ROOT)]
    code = pytest.main([*words, "-n", str(processes), "--dist", "worksteal"], plugins=[counter])
    record = {
        "commit": args.commit or commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(
            ["python benchmarks/gpu_record.py", *(args.tests if args.tests != ["tests"] else [])]
        ),
        "passed": counter.passed,
        "failed": len(counter.failed),
        "failures": counter.failed,
        "skipped": counter.skipped,
        "seconds": round(time.monotonic() - began, 1),
    }
    # A session that was interrupted, or that collected nothing, is no record.
    if code > pytest.ExitCode.TESTS_FAILED:
        print(f"gpu_record: pytest ended with code {int(code)}; nothing is written", file=sys.stderr)
        return 1
    if not args.dry_run:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 1 if counter.failed else 0


if __name__ == "__main__":
    sys.exit(main())
