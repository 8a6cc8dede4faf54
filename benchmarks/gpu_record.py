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


def main() -> int:
    """Run the tests; 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests")
    parser.add_argument("--commit", help="the commit of this tree, where git cannot say it")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_record: needs a CUDA device; CI has none, run it where there is one", file=sys.stderr)
        return 2
    counter, began = Counter(), time.monotonic()
    pytest.main([*args.tests, "-m", "gpu or kernels", "-q", "--rootdir", str(ROOT)], plugins=[counter])
    record = {
        "commit": args.commit or commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/gpu_record.py " + " ".join(args.tests),
        "passed": counter.passed,
        "failed": len(counter.failed),
        "failures": counter.failed,
        "skipped": counter.skipped,
        "seconds": round(time.monotonic() - began, 1),
    }
    if not args.dry_run:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 1 if counter.failed else 0


if __name__ == "__main__":
    sys.exit(main())
