"""Run timm's own tests of its models over names of this package; the counts go to results/timm_tests.json.

python -m pip download --no-deps --no-binary :all: timm && tar xzf timm-*.tar.gz
python benchmarks/timm_tests.py timm-1.0.31
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import fathoms.timm_models  # noqa: F401 - registers the names

NAMES = [
    f"fathoms_{name}"
    for name in (
        "vit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "deit3_small_patch16_224",
        "cait_xxs24_224",
        "vit_scaler_192x12_16",
        "vit_ti16_dpn_224",
        "vit5_small_patch16_224",
        "cct_7_3x1_32",
    )
]
"""One name of each family."""
RESULT = Path(__file__).parents[1] / "results" / "timm_tests.json"


def listed(filter: Any = "", *_: Any, **asked: Any) -> list[str]:
    """What timm's file asks for, of our names: it leaves ViTs out by patterns of theirs, and we publish no weights."""
    if asked.get("pretrained"):
        return []
    wanted = [filter] if isinstance(filter, str) else filter
    found = []
    for name in NAMES:
        own = name.removeprefix("fathoms_").replace("cct_", "vit_cct_").replace("vit5_", "vit_")
        if any(fnmatch.fnmatch(own, each) for each in asked.get("exclude_filters") or ()):
            continue
        if not any(wanted) or any(fnmatch.fnmatch(own, each) for each in wanted):
            found.append(name)
    return found


class Counts:
    """A pytest plugin: outcomes by test, and the first line of each failure."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.failures: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only what is about this package's names."""
        items[:] = [item for item in items if "fathoms_" in item.name]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once."""
        if report.when == "call" or report.skipped:
            test = report.nodeid.partition("::")[2]
            self.outcomes.setdefault(test.partition("[")[0], Counter())[report.outcome] += 1
            if report.failed:
                lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
                self.failures[test] = re.sub(r"\s+", " ", lines[0][2:]).strip()[:160] if lines else ""


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timm", type=Path, help="the folder of timm's sources")
    arguments = parser.parse_args()
    timm.list_models = listed
    counts = Counts()
    file = arguments.timm / "tests" / "test_models.py"
    pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", str(file)], plugins=[counts])
    rows = {test: dict(found) for test, found in sorted(counts.outcomes.items())}
    about = {"timm": timm.__version__, "torch": torch.__version__, "names": NAMES}
    RESULT.write_text(json.dumps({**about, "tests": rows, "failures": counts.failures}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
