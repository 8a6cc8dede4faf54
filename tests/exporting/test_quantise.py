"""int8 quantisation: what it saves, what it costs, and when it is refused."""

from __future__ import annotations

import json

import pytest
import torch

from fathoms import FathomsError, create_model
from fathoms.cli.main import main
from fathoms.data.sources.arrays import digit_sources
from fathoms.evaluating.load import load_run
from fathoms.evaluating.preprocessing import Preprocessing, eval_loader
from fathoms.exporting import Judge, export_model


@pytest.mark.compile
def test_int8_shows_what_it_saves_and_costs(digits_run, tmp_path, capsys):
    words = ["export", str(digits_run), "--int8", "digits", "--output", str(tmp_path / "m.onnx")]
    assert main([*words, "--max-drop", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (before, after), (large, small) = report["int8"]["top1"], report["int8"]["bytes"]
    assert before == pytest.approx(load_run(str(digits_run)).metrics["test"]["top1"])
    assert before - after <= 2
    assert small < 0.6 * large
    assert (tmp_path / "m.onnx").stat().st_size == small
    assert max(report["differences"].values()) < 1e-4
    assert "The matrices are int8" in (tmp_path / "m.onnx.md").read_text()
    assert main([*words, "--overwrite"]) == 0
    assert f"int8: top1 {before:.2f} -> {after:.2f} on" in capsys.readouterr().out


@pytest.mark.compile
def test_int8_that_costs_too_much_is_not_written(digits_run, tmp_path):
    """No file loses less than minus one hundred points."""
    model = load_run(str(digits_run)).model
    source = digit_sources()[1]
    loader = eval_loader(source, 8, 64, Preprocessing())
    judge = Judge("digits", lambda: loader.epoch(0), 10, max_drop=-101.0)
    with pytest.raises(FathomsError, match="int8 takes top1 on digits from .* nothing was written"):
        export_model(model, tmp_path / "m.onnx", int8=judge)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.compile
@pytest.mark.parametrize("calibrated", [False, True])
def test_layers_that_int8_harms_stay_float_one_at_a_time_with_the_reason(tmp_path, monkeypatch, calibrated):
    """The patch projection first, then the MLP output into which the largest outlier goes: that of the second block."""
    onnx = pytest.importorskip("onnx")
    model = create_model("vit_digits", depth=2, num_classes=10).eval()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.bias[0] = 4000.0
    scores = iter([90.0, 70.0, 80.0, 89.5])
    monkeypatch.setattr(Judge, "top1", lambda *_: (next(scores), 359))
    train, test = (eval_loader(source, 8, 64, Preprocessing()) for source in digit_sources())
    calibration = (lambda: train.epoch(0)) if calibrated else None
    judge = Judge("digits", lambda: test.epoch(0), 10, calibration=calibration)
    found = export_model(model, tmp_path / "m.onnx", int8=judge).int8
    assert found.top1 == (90.0, 89.5)
    projection, output = found.kept
    assert projection == "the patch projection stays float32: top1 fell from 90.00 to 70.00 with it in int8"
    assert output.startswith("MLP output 2 of 2, whose input reaches ")
    assert f"{output}." in (tmp_path / "m.onnx.md").read_text()
    graph = onnx.load(tmp_path / "m.onnx").graph
    kinds = {node.op_type for node in graph.node}
    assert ("DynamicQuantizeLinear" in kinds, "QuantizeLinear" in kinds) == (not calibrated, calibrated)
    matrices = {1: [], 3: []}
    for tensor in graph.initializer:
        if len(tensor.dims) == 2 and min(tensor.dims) > 1:
            matrices.setdefault(tensor.data_type, []).append(tuple(tensor.dims))
    hidden, width = model.blocks[0].mlp.fc2.in_features, model.config.dim
    assert (matrices[1].count((hidden, width)), matrices[3].count((hidden, width))) == (1, 1)
    assert matrices[3].count((width, hidden)) == 2
