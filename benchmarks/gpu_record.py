"""Run the GPU tests and keep a record of it: results/gpu_tests.json (commit, device, counts, seconds).

python benchmarks/gpu_record.py                       # what `make gpu` runs
python benchmarks/gpu_record.py --commit abc1234      # where the tree has no git folder
python benchmarks/gpu_record.py tests/ops --dry-run   # some of the tests, nothing written
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "gpu_tests.json"


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


def commit() -> str:
    """The commit that is checked out, with a plus if files differ from it."""
    try:
        name = subprocess.check_output(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, stderr=subprocess.DEVNULL
        )
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+" if changed.strip() else "")


def run_here(tests: list[str]) -> dict[str, Any]:
    """Run tests in this process and count what becomes of them."""
    counter = Counter()
    pytest.main([*tests, "-m", "gpu or kernels", "-q", "--rootdir", str(ROOT)], plugins=[counter])
    return {
        "passed": counter.passed,
        "failed": len(counter.failed),
        "failures": counter.failed,
        "skipped": counter.skipped,
        "unfinished": [],
    }


def run_side_by_side(tests: list[str], limit: float) -> dict[str, Any]:
    """Run each path in a process of its own, at most `limit` seconds; what is not done by then is named."""
    script, ends = str(Path(__file__).resolve()), time.monotonic() + limit
    started = {
        path: subprocess.Popen(
            [sys.executable, script, path, "--dry-run"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for path in tests
    }
    total: dict[str, Any] = {"passed": 0, "failed": 0, "failures": [], "skipped": 0, "unfinished": []}
    for path, process in started.items():
        try:
            printed, _ = process.communicate(timeout=max(1.0, ends - time.monotonic()))
            own = json.loads(printed.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            process.kill()
            total["unfinished"].append(path)
            continue
        total = {key: total[key] + own[key] for key in total}
    return total


def main() -> int:
    """Run the tests; 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests")
    parser.add_argument("--commit", help="the commit of this tree, where git cannot say it")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument(
        "--limit", type=float, help="run each path in its own process, at most so many seconds"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_record: needs a CUDA device; CI has none, run it where there is one", file=sys.stderr)
        return 2
    began = time.monotonic()
    counts = run_here(args.tests) if args.limit is None else run_side_by_side(args.tests, args.limit)
    record = {
        "commit": args.commit or commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/gpu_record.py " + " ".join(args.tests),
        **counts,
        "seconds": round(time.monotonic() - began, 1),
    }
    if not args.dry_run:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 1 if counts["failed"] or counts["unfinished"] else 0


if __name__ == "__main__":
    sys.exit(main())
