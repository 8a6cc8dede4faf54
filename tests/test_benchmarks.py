"""Benchmarks: the files they write, and what they refuse."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def kept(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


@pytest.fixture
def script(monkeypatch):
    """A benchmark as a module; it and those it imports are forgotten afterwards."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) == str(ROOT / "benchmarks" / f"{name}.py"):
            del sys.modules[name]


def test_the_table_of_whole_models_is_that_of_its_rows(script):
    assert (ROOT / "results" / "models.md").read_text() == script("models").as_table(kept("models"))


def test_rows_of_operations_hold_the_limits_of_their_own_run():
    report = kept("ops")
    assert set(report) == {"rows"}
    for row in report["rows"].values():
        assert {"device", "torch", "shape"} < set(row)
        assert {"matrix_tflops", "copy_tbps"} & set(row)


def test_a_run_of_one_operation_leaves_the_rows_of_others(script, monkeypatch, tmp_path):
    ops = script("ops")
    monkeypatch.setattr(ops.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ops.torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(ops, "device_limits", lambda: {"matrix_tflops": 2.0, "copy_tbps": 1.0})
    monkeypatch.setattr(ops, "measure_gelu", lambda shape, _: {"shape": shape})
    monkeypatch.setattr(ops, "gelu_line", str)
    (tmp_path / "ops.json").write_text('{"rows": {"gelu_mlp 1x1x1": {"copy_tbps": 4.0}}}')
    monkeypatch.setattr(sys, "argv", ["ops.py", "--op", "bias_gelu", "--output", str(tmp_path / "ops")])
    ops.main()
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert rows.pop("gelu_mlp 1x1x1") == {"copy_tbps": 4.0}
    assert list(rows) == [f"bias_gelu {tokens}x{channels}" for tokens, channels in ops.GELU_SHAPES]
    assert all((row["device"], row["copy_tbps"]) == ("a device", 1.0) for row in rows.values())
    assert [path.name for path in tmp_path.iterdir()] == ["ops.json"]


def test_bounds_are_not_watched_where_tensors_share_an_allocation():
    environment = {key: value for key, value in os.environ.items() if key != "PYTORCH_NO_CUDA_MEMORY_CACHING"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bounds.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"bounds: .*; set PYTORCH_NO_CUDA_MEMORY_CACHING=1\n", done.stderr)


def test_two_runs_print_how_far_they_are_end_in_time_and_are_written(script, monkeypatch, tmp_path, capsys):
    two_runs = script("two_runs")
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(two_runs.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(two_runs, "train_at_once", lambda count, *_: 4.0 * count)
    target = tmp_path / "two_runs.json"
    monkeypatch.setattr(
        sys, "argv", ["two_runs.py", "--seconds", "60", "--rounds", "9", "--output", str(target)]
    )
    two_runs.main()
    said = capsys.readouterr()
    assert "round 1 of 9, as fathoms sets it, 2 at once: 8.0 s of training" in said.err
    assert "later are left out" in said.err
    rows = json.loads(target.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["as fathoms sets it", "one thread"]
    assert 1 <= rows[0]["rounds"] < 9
    assert (rows[0]["alone_s"], rows[0]["together_s"]) == (4.0, 8.0)
