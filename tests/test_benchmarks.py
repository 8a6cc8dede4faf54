"""Benchmarks: the files they write, and what they refuse."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fathoms
from fathoms.parts import RESIDUALS

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
        [sys.executable, ROOT / "benchmarks" / "coordinates.py", "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.partition(" ")[0]) == (0, "usage:")


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


def test_the_table_of_coordinate_checks_has_every_residual_method_and_keel():
    assert kept("coordinates")["rows"].keys() == {*RESIDUALS, "keel"}


def test_the_table_of_parts_is_that_of_its_rows(script):
    assert (ROOT / "results" / "parts.md").read_text() == script("parts").as_table(kept("parts"))


def test_the_table_and_the_picture_of_the_sweep_are_those_of_its_rows(script):
    sweep, rows = script("lr_over_depth"), kept("lr_over_depth")["rows"]
    assert (ROOT / "results" / "lr_over_depth.md").read_text() == sweep.as_table(rows)
    assert (ROOT / "results" / "lr_over_depth.svg").read_text() == sweep.as_picture(rows).svg()


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


def curve(losses, depth=6, method="none"):
    rates = (1e-3, 2e-3, 4e-3, 8e-3)
    return [
        {"residual": method, "depth": depth, "lr": rate, "diverged": 0, "failed": 0}
        | {"loss": {"0": loss, "1": loss + 0.1}, "top1": {"0": 50.0, "1": 49.0}}
        for rate, loss in zip(rates, losses, strict=True)
    ]


def test_the_best_learning_rate_is_the_lowest_point_of_the_parabola_and_an_edge_is_marked(script):
    sweep = script("lr_over_depth")
    # A parabola over log2(lr), lowest at 3e-3.
    lowest = [1 + (math.log2(rate / 3e-3)) ** 2 for rate in (1e-3, 2e-3, 4e-3, 8e-3)]
    found = sweep.best(curve(lowest))
    assert found["lr"] == 4e-3
    assert found["fitted"] == pytest.approx(3e-3)
    assert not found["edge"]
    edge = sweep.best(curve([1.0, 2.0, 3.0, 4.0]))
    assert (edge["lr"], edge["fitted"], edge["edge"]) == (1e-3, 1e-3, True)
    diverged = curve(lowest)
    diverged[2]["diverged"] = 1
    assert sweep.best(diverged)["lr"] == 2e-3


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


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("triton_per_fused__to_copy_add_addmm_native_layer_norm_3", "norms, residuals, activations"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("mix_grad_kernel", "attention"),
        ("gelu_grad_kernel", "norms, residuals, activations"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", "copies and casts"),
        ("ncclDevKernel", "other"),
    ],
)
def test_a_kernel_is_counted_with_its_kind(script, kernel, kind):
    assert script("profile_models").kind_of(kernel) == kind


def test_a_profile_adds_up_to_the_update(script):
    profile = script("profile_models")
    events = [("cutlass_gemm", 60.0), ("mix_kernel", 20.0), ("gelu_kernel", 10.0), ("Memset", 5.0)]
    made = profile.summarise(events, wall=100.0, updates=1)
    assert sum(made["kinds"].values()) == pytest.approx(100.0)
    assert made["kinds"][profile.GAP] == pytest.approx(5.0)
    row = {**made, "batch": 2, "wall_us": 100.0, "device": "a GPU", "torch": "2", "floors": {}}
    row["floors"] = {"products and attention": 30.0}
    assert profile.excess(row)["products and attention"] == (80.0, 30.0)
    table = profile.as_table({"rows": {"one": row, "two": {"failed": "out of memory"}}})
    assert "| products and attention | 80 | 80 % | 30 | 50 |" in table
    assert "failed: out of memory" in table


def test_floors_grow_with_the_batch_and_not_the_optimizers(script):
    profile = script("profile_models")
    model = fathoms.create_model("vit_small_patch16_224", **profile.TINY)
    limits = {"matrix_tflops": 800.0, "copy_tbps": 4.0}
    one, two = (profile.floors(model, batch, limits) for batch in (1, 2))
    assert two["products and attention"] == pytest.approx(2 * one["products and attention"])
    assert two["optimizer and casts"] == one["optimizer and casts"]


def test_the_goals_of_the_default_recipe_need_every_seed_fast_and_the_mean_accurate(script):
    cifar = script("cifar_default")
    runs = [{"top1": top1, "images_per_second": 31_000.0} for top1 in (89.9, 90.0, 90.4)]
    assert cifar.summarise(runs)["reached"]
    assert not cifar.summarise([*runs, {"top1": 90.5, "images_per_second": 29_000.0}])["reached"]
    assert not cifar.summarise(runs[:1])["reached"]


def test_latency_that_was_not_measured_is_not_a_number(script):
    latency = script("latency")
    row = {"device": "a GPU", "torch": "2", "model": "ViT", "form": "plain", "run": "eager"}
    cells = {"1": latency.summarise([1.0] * 50), "8": {"failed": "no kernel"}}
    table = latency.as_table({"rows": {"one": {**row, "batches": cells}}})
    assert "| ViT | plain | eager | 1.00 / 1.00 | failed: no kernel | not measured |" in table


def test_start_up_is_compared_with_an_earlier_run(script):
    def row(first, wall):
        return {"wall": wall, "phases": {"first update": {"ended": first}, "report": {"ended": wall - 1}}}

    report = {"before": {"second": row(18.0, 31.0), "gone": row(1.0, 2.0)}, "second": row(9.0, 20.0)}
    assert script("startup").compare(report) == (
        "second: first update 18.0 -> 9.0 s, wall clock 31.0 -> 20.0 s, exit 1.0 -> 1.0 s"
    )


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
