"""SIGKILLs at random during a tuned comparison with looks and a dropped arm on two workers change no result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_kills.py"


@pytest.mark.full
@pytest.mark.slow
def test_ten_kills_leave_the_results_bit_for_bit_as_they_were(tmp_path):
    out = tmp_path / "kills.json"
    line = [sys.executable, str(SCRIPT), "--kills", "10", "--seed", "1", "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["equal"]
    assert result["trials"] >= 12
    assert result["arms_dropped"] == 2
    assert {kill["kind"] for kill in result["kills"]} == {"group", "parent", "worker"}
    # If no kill met a run under way, nothing was tried.
    assert sum(kill["cells_cut"] > 0 for kill in result["kills"]) >= 3
