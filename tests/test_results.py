"""README and docs state what results/ holds, and a run changes only the rows there that it measured."""

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
README, SPEED = ((ROOT / name).read_text() for name in ("README.md", "docs/speed.md"))


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


def test_the_readmes_speeds_are_those_kept():
    rows = kept("models")["rows"]
    (line,) = [line for line in README.splitlines() if "timm + torch.compile" in line]
    stated = re.findall(r"([\w-]+) (?:trains )?([\d.]+) times (?:as fast [\w\s+.]+ )?in ([\d.]+)", line)
    names = {"cait_s24_224": "cait_s24_224", "cait_s24_384": "cait_s24_384", "ViT-S": "vit_small"}
    assert stated == [
        (name, f"{rows[row]['ratio']:.2f}", f"{rows[row]['memory_ratio']:.2f}") for name, row in names.items()
    ]
    assert "CUDA graph" in line
    assert {rows[row]["settings"]["timm"]["launch"] for row in names.values()} == {"eager"}


def test_the_readmes_loader_is_the_one_kept():
    spans = []
    for part in ("cpu", "cpu_bilinear"):
        ratios = [ratio for path, ratio in kept("loader")[part]["ratios"].items() if path != "timm"]
        spans.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
    assert f"pipeline {spans[0]} times as fast per core as timm's ({spans[1]} with bilinear" in README


def test_the_table_of_whole_models_is_the_one_kept(script):
    report = kept("models")
    assert (ROOT / "results" / "models.md").read_text() == script("models").as_table(report)
    lines = []
    for name, row in report["rows"].items():
        if "timm" not in row["sides"]:
            continue
        sides = [f"{row[side]['images_per_second']:,.0f} images/s" for side in row["sides"]]
        if not name.endswith("_infer"):
            sides = [
                f"{cell}, {row[side]['peak_gib']:.1f} GiB"
                for cell, side in zip(sides, row["sides"], strict=True)
            ]
        lines.append(f"| {sides[0]} | {sides[1]} | {row['ratio']:.2f}× | {row['memory_ratio']:.2f}× |")
    table = SPEED.partition("| work, one H200")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line[line.index(" |") + 1 :] for line in table] == lines


def test_what_is_said_of_training_from_files_is_kept():
    loader = kept("loader")
    epochs = loader["train_from_a_pack"]["images_per_second_of_epochs_2_to_4"]
    assert f"at {min(epochs):,} to {max(epochs):,} images/s" in SPEED
    assert f"gave {loader['feed_graph_processes']['still_images_per_second']:,.0f} (" in SPEED
    launched = loader["feed_compiled_processes"]["still_images_per_second"]
    assert re.search(rf"kernel by kernel under autocast, ours trains at\s{launched:,.0f} images/s", SPEED)


def milli(form):
    return f"{form['forward_ms']:.3f} / {form['training_ms']:.3f} ({form['peak_mib']:.0f} MiB)"


def micro(form):
    return f"{1e3 * form['forward_ms']:.1f}"


def op_cells(op, row):
    """The cells of a row of docs/speed.md, after the shape."""
    if op == "talking_heads":
        forms = [row[name] for name in ("triton", "compiled", "compiled_timm")]
        times = [f"{form['training_ms']:#.3g} ({form['peak_mib']:,.0f} MiB)" for form in forms]
        return [*times, f"{row['sdpa']['training_ms']:.2f}"]
    if op == "class_attention":
        return [milli(row[name]) for name in ("plain", "compiled", "absorbed", "absorbed_compiled")]
    forms = [row[name] for name in ("triton", "compiled", "eager")]
    speed = min(forms[1]["forward_ms"], forms[2]["forward_ms"]) / forms[0]["forward_ms"]
    return [*(f"{micro(form)} ({form['peak_mib']:.0f} MiB)" for form in forms), f"{speed:.1f}×"]


@pytest.mark.parametrize(
    ("op", "head", "shape"),
    [
        ("talking_heads", "| B, H, N, K |", lambda shape: shape),
        ("class_attention", "| B, N, D, H |", lambda shape: shape),
        ("gelu_mlp", "| channels |", lambda shape: shape[1:2]),
    ],
)
def test_the_tables_of_operations_are_those_kept(op, head, shape):
    rows = [row for name, row in kept("ops")["rows"].items() if name.startswith(f"{op} ")]
    lines = [[", ".join(f"{n:,}" for n in shape(row["shape"])), *op_cells(op, row)] for row in rows]
    table = SPEED.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    assert sorted(table) == sorted(f"| {' | '.join(cells)} |" for cells in lines)


def test_what_is_said_of_operations_and_of_a_norm_is_kept():
    rows, stated = kept("ops")["rows"], " ".join(SPEED.split())

    def of(op, number, digits):
        found = [row[number] for name, row in rows.items() if name.startswith(f"{op} ")]
        *first, last = (f"{value:.{digits}f}" for value in found)
        return f"{', '.join(first)} and {last}"

    gelu = [of("bias_gelu", f"speedup_{part}", 2) for part in ("forward", "training")]
    assert f"a forward pass is {gelu[0]} times as fast as torch.compile's" in stated
    assert f"one with its gradients {gelu[1]} times" in stated
    heads = of("talking_heads", "speedup_over_timm_training", 1)
    assert f"That is {heads} times as fast as timm's code" in stated
    assert f"That is {of('class_attention', 'speedup_training', 2)} times as fast as the reference" in stated
    norm = kept("models")["rows"]["vit_192x36_scaler"]
    rates = " and ".join(f"{norm[side]['images_per_second']:,.0f}" for side in norm["sides"])
    assert (
        f"trains {norm['ratio']:.2f} times as fast as our own LayerNorm in ViT 192×36 ({rates} images/s)"
        in stated
    )


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
