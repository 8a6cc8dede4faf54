"""int8 quantisation: what it saves, what it costs, and when it is refused."""

from __future__ import annotations

import json

import pytest

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.data.sources.arrays import digit_sources
from fathoms.evaluating.load import load_run
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.exporting.export import Judge, export_model


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
    from fathoms.evaluating.preprocessing import eval_loader

    loader = eval_loader(source, 8, 64, Preprocessing())
    judge = Judge("digits", lambda: loader.epoch(0), 10, max_drop=-101.0)
    with pytest.raises(FathomsError, match="int8 takes top1 on digits from .* nothing was written"):
        export_model(model, tmp_path / "m.onnx", int8=judge)
    assert list(tmp_path.iterdir()) == []
