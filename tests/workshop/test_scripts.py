"""Benchmarks: the files they write, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fathoms.parts import RESIDUALS

ROOT = Path(__file__).parents[2]


def kept(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


PROGRAMS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_parses_its_arguments_so_that_help_does_not_start_it(path):
    assert re.search(r"\bparse_args\(", path.read_text())


def test_help_of_a_benchmark_without_options_prints_its_page():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "signal_by_part.py", "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.partition(" ")[0]) == (0, "usage:")


def test_mutants_are_one_change_each_and_leave_messages_alone(script):
    text = 'def f(a, b=1):\n    "Says."\n    if a < b:\n        raise ValueError(f"{a + 1}")\n    return g(a, b)\n'
    found = {(mutant["kind"], mutant["body"]) for mutant in script("mutants_source").mutants("f.py", text)}
    assert found == {
        ("off by one", text.replace("b=1", "b=2")),
        ("comparison", text.replace("a < b", "(a <= b)")),
        ("swapped arguments", text.replace("g(a, b)", "(g(b, a))")),
    }


def test_the_table_of_whole_models_is_that_of_its_rows(script):
    assert (ROOT / "results" / "models.md").read_text() == script("models").as_table(kept("models"))


def test_the_page_of_the_duel_is_that_of_its_rows(script):
    assert (ROOT / "results" / "duel.md").read_text() == script("duel_page").page(kept("duel"))


def test_the_duel_sees_another_option_another_pixel_and_another_start(script):
    state = {"a": torch.randn(50, 50, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(3)}
    side = {
        "args": {"lr": 0.1, "scale": [0.08, 1.0], "mean": None, "only_here": 1},
        "pixels": dict.fromkeys(("mean", "std", "crop_pct", "interpolation", "input_size"), (0.5,)),
        "groups": [{"weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-6, "names": ["a", "b"]}],
        "drop_path": [0.0, 0.1],
        "batches_per_epoch": 4,
        "transforms": "None",
        "state": state,
    }

    def differing(**changed):
        return [name for name, *pair in script("duel").settings(side, side | changed) if pair[0] != pair[1]]

    assert differing() == []
    assert differing(args={"lr": 0.1, "scale": (0.08, 1), "mean": 0.5}) == []
    assert differing(args={"lr": 0.2, "scale": (0.08, 1)}) == ["--lr"]
    assert differing(pixels=side["pixels"] | {"crop_pct": 1.0}) == ["images: crop_pct"]
    assert differing(drop_path=[0.1, 0.1]) == ["drop_path"]
    # Drawn anew from one distribution, and from another.
    again = torch.randn(50, 50, generator=torch.Generator().manual_seed(1))
    assert differing(state=state | {"a": again}) == []
    assert differing(state=state | {"a": 2 * again}) == ["start: deviation of a"]


def test_the_duel_sees_another_draw_in_its_own_number(script):
    draws = script("duel_draws")

    def side(seed, change=lambda pixels: pixels, mixed=False):
        rng = torch.Generator().manual_seed(seed)
        batches = [torch.rand(20, 3, 8, 8, generator=rng) * 2 - 1 for _ in range(30)]
        targets = [torch.rand(20, 4, generator=rng) if mixed else torch.zeros(20).long() for _ in batches]
        return draws.measured((change(each), target) for each, target in zip(batches, targets, strict=True))

    def apart(first, second):
        return {name for name, *_, z, p in draws.compared(first, second)["rows"] if abs(z) > 5 or p < 1e-6}

    def redder(pixels):
        return pixels + 0.05 * torch.tensor([1.0, 0.0, 0.0])[:, None, None]

    def filled(pixels):
        return torch.cat([torch.full_like(pixels[..., :2, :], 128 / 127.5 - 1), pixels[..., 2:, :]], 2)

    for mixed in (False, True):
        assert apart(side(0, mixed=mixed), side(1, mixed=mixed)) == set()
    assert "red" in apart(side(0), side(1, redder))
    assert "blue" not in apart(side(0), side(1, redder))
    assert {"share of fill", "gradient down"} <= apart(side(0), side(1, filled))


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
    (tmp_path / "ops.json").write_text('{"rows": {"talking_heads 1x1x1x1": {"copy_tbps": 4.0}}}')
    monkeypatch.setattr(sys, "argv", ["ops.py", "--op", "bias_gelu", "--output", str(tmp_path / "ops")])
    ops.main()
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert rows.pop("talking_heads 1x1x1x1") == {"copy_tbps": 4.0}
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


def test_the_table_of_coordinate_checks_has_every_residual_method_and_keel():
    assert kept("coordinates")["rows"].keys() == {*RESIDUALS, "keel"}


def test_the_table_of_parts_is_that_of_its_rows(script):
    assert (ROOT / "results" / "parts.md").read_text() == script("parts").as_table(kept("parts"))


def test_a_part_that_costs_more_than_a_tenth_says_why(script):
    parts = script("parts")
    side = {"images_per_second": 80.0}
    row = {"device": "a device", "torch": "2", "options": {"residual": "x"}, "memory_ratio": 1.0}
    row |= {"none": {"images_per_second": 100.0}, "multiplications_ratio": 1.0}
    rows = {name: {**row, name: side, "ratio": ratio} for name, ratio in (("keel", 0.8), ("prores", 0.95))}
    table = parts.as_table({"rows": rows}).splitlines()
    assert table[-2].endswith(f"| {parts.WHY['keel']} |")
    assert table[-1].endswith("| 1.00 |  |")
    # A scale that is absorbed into a linear, and a read-out, cost next to nothing.
    assert parts.PARTS.keys() - parts.WHY.keys() == {"completep", "seqpool"}


def test_ended_runs_come_back_out_of_an_archive_without_checkpoints_or_unfinished_runs(script, tmp_path):
    archive = script("comparison_archive")
    ended, cut = json.dumps({"status": "diverged"}), json.dumps({"status": "interrupted"})
    files = {
        "cells/a/checkpoints/last/model": "x",
        "cells/a/summary.json": ended,
        "cells/b/summary.json": cut,
        "cells/c/metrics.jsonl": "",
        "tuning/d/summary.json": ended,
        "tuning/e/summary.json": cut,
        "results.json": "{}",
    }
    for name, text in files.items():
        path = tmp_path / "out" / "none" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    archive.pack(tmp_path / "out", tmp_path / "kept.tar.gz")
    archive.unpack(tmp_path / "kept.tar.gz", tmp_path / "back")
    there = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*.json")}
    assert there == {"none/results.json", "none/cells/a/summary.json", "none/tuning/d/summary.json"}
    assert (tmp_path / "back" / "none" / "cells" / "a" / "summary.json").read_text() == ended
    assert not list((tmp_path / "back").rglob("model"))


def test_a_file_that_vanishes_or_is_replaced_while_it_is_packed_leaves_the_archive_whole(
    script, tmp_path, monkeypatch
):
    archive = script("comparison_archive")
    folder = tmp_path / "out" / "none"
    folder.mkdir(parents=True)
    for name in ("plan.json", "results.json", "results.json.part"):
        (folder / name).write_text("before")
    read = Path.read_bytes

    def replaced(path):
        if path.suffix == ".part":
            path.unlink()
        elif path.name == "results.json":
            path.write_text("a longer text than before")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", replaced)
    archive.pack(tmp_path / "out", tmp_path / "kept.tar.gz")
    monkeypatch.undo()
    archive.unpack(tmp_path / "kept.tar.gz", tmp_path / "back")
    found = {path.name: path.read_text() for path in (tmp_path / "back" / "none").iterdir()}
    assert found == {"plan.json": "before", "results.json": "a longer text than before"}


TINY_PLAN = """
seeds = 1
tune_epochs = 1
[train]
recipe = "digits"
depth = 1
dim = 16
heads = 2
epochs = 1
warmup_epochs = 0
[axes]
norm = ["layernorm", "dyt"]
[tune]
lr = ["1e-3", "2e-3"]
"""


def evidence(tmp_path, *words):
    """The queue of evidence with one tiny question on the digits."""
    command = [sys.executable, ROOT / "benchmarks" / "evidence.py", "--only", "tiny", "--plans", tmp_path]
    done = subprocess.run(
        [*command, "--results", tmp_path / "results", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.plain
def test_a_stretch_of_evidence_is_archived_published_and_goes_on_elsewhere(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY_PLAN)
    assert evidence(tmp_path) == (0, ["tiny: 0 of 4 trials, 0 of 2 runs"])
    archive = tmp_path / "kept.tar.gz"
    here = ("--run", "--output", tmp_path / "here")
    assert evidence(tmp_path, *here, "--budget", "1", "--archive", archive)[0] == 75
    assert evidence(tmp_path, *here, "--archive", archive) == (
        0,
        ["tiny: 4 of 4 trials, 2 of 2 runs, exit 0"],
    )
    there = ("--output", tmp_path / "there", "--begin", archive)
    assert evidence(tmp_path, "--publish", *there) == (0, ["published: tiny: 4 of 4 trials, 2 of 2 runs"])
    # A third machine has only what is published, and trains only what is added.
    published = tmp_path / "results" / "tiny"
    (tmp_path / "tiny.toml").write_text(TINY_PLAN.replace("seeds = 1", "seeds = 2"))
    code, said = evidence(tmp_path, "--run", "--output", tmp_path / "third")
    assert (code, said) == (0, ["tiny: 4 of 4 trials, 4 of 4 runs, exit 0"])
    log = (tmp_path / "third" / "tiny.log").read_text()
    assert "4 of 4 runs are there already" in log
    assert "2 of 4 runs are there already" in log
    before, after = (
        json.loads((folder / "results.json").read_text())
        for folder in (published, tmp_path / "third" / "tiny")
    )
    for row in before["cells"]:
        assert row in after["cells"]
    for run in published.glob("*/*"):
        moved = tmp_path / "third" / "tiny" / run.relative_to(published)
        assert {path.name: path.read_bytes() for path in run.iterdir()} == {
            path.name: (moved / path.name).read_bytes() for path in run.iterdir()
        }


def test_the_small_training_set_has_as_many_images_of_each_class_and_val_has_others(script):
    small = script("small_cifar")
    labels = np.arange(60, dtype=np.uint8) % 3
    arrays = {"x_train": np.arange(60), "y_train": labels, "x_test": np.arange(9), "y_test": labels[:9]}
    made = small.smaller({**arrays, "classes": np.array(["a", "b", "c"])}, 4)
    assert made["x_train"].tolist() == list(range(12))
    assert made["x_val"].tolist() == list(range(12, 24))
    assert np.bincount(made["y_train"]).tolist() == np.bincount(made["y_val"]).tolist() == [4, 4, 4]
    assert made["x_test"].tolist() == list(range(9))
    with pytest.raises(ValueError, match="class 0 has 20 images; 22 are needed"):
        small.smaller({**arrays, "classes": np.array(["a", "b", "c"])}, 11)


def test_the_record_of_the_gpu_tests_says_when_it_is_old(script, tmp_path, monkeypatch):
    record = script("gpu_record")
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.json")

    def said(changes, **values):
        record.RECORD.write_text(json.dumps({"commit": "abcdef012345", "failed": 0, **values}))
        monkeypatch.setattr(record, "git", lambda *_: changes)
        return record.stale()

    assert said("") is None
    assert said(" 2 files changed, 60 insertions(+), 40 deletions(-)") is None
    assert "101 lines have changed" in said(" 2 files changed, 61 insertions(+), 40 deletions(-)")
    assert "abcdef01, which is not here" in said(None)
    assert "2 GPU tests failed" in said("", failed=2)
