"""`fathoms export --fastest`: the quickest file whose accuracy holds; OpenVINO and int8 files as models."""

from __future__ import annotations

import json

import pytest
import torch

from fathoms import FathomsError, ViT, create_model
from fathoms.cli.main import main
from fathoms.data.sources.arrays import digit_sources
from fathoms.evaluating import onnx_model
from fathoms.evaluating.load import load_run
from fathoms.evaluating.preprocessing import Preprocessing, eval_loader
from fathoms.exporting import Judge, export_model, fastest
from fathoms.exporting.fastest import CANDIDATES, Tried, compared, export_fastest, ratio

PLAIN, SMALL, CALIBRATED = CANDIDATES[:3]


def judge(**options):
    train, test = (eval_loader(source, 8, 64, Preprocessing()) for source in digit_sources())
    options = {"max_drop": 3.0, "calibration": lambda: train.epoch(0)} | options
    return Judge("digits", lambda: test.epoch(0), 10, **options)


def in_milliseconds(monkeypatch, **ms):
    """Times by name; anything else takes as long as the model."""
    monkeypatch.setattr(
        fastest, "race", lambda make, _: {name: {"1 x 1": ms.get(name, 4.0)} for name in make(1)}
    )


@pytest.mark.compile
def test_the_quickest_file_within_the_drop_is_written_and_no_other(digits_run, tmp_path, monkeypatch):
    monkeypatch.setattr(fastest, "CANDIDATES", (PLAIN, SMALL))
    model = load_run(str(digits_run)).model
    in_milliseconds(monkeypatch, **{SMALL.name: 1.0, PLAIN.name: 2.0})
    found = export_fastest(model, tmp_path / "m", judge(calibration=None), name="digits")
    assert found.exported.int8 is not None
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.onnx.json", "m.onnx.md"}
    assert json.loads((tmp_path / "m.onnx.json").read_text())["int8"]["images"] == 359
    rows = {row.name: row for row in found.tried}
    assert (rows[SMALL.name].times, rows[PLAIN.name].times) == (4.0, 2.0)
    assert rows[PLAIN.name].agreement == 100
    assert rows[SMALL.name].bytes < 0.6 * rows[PLAIN.name].bytes
    with pytest.raises(FathomsError, match="is there already"):
        export_fastest(model, tmp_path / "m", judge(calibration=None))
    monkeypatch.setattr(Judge, "top1", lambda _, model, __: (90.0 if isinstance(model, ViT) else 80.0, 359))
    found = export_fastest(model, tmp_path / "m", judge(calibration=None), overwrite=True)
    assert found.exported.int8 is None, "int8 loses more than may be lost"
    problem = next(row.problem for row in found.tried if row.name == SMALL.name)
    assert problem == "int8 takes top1 on digits from 90.00 to 80.00, more than 3 points"


@pytest.mark.compile
def test_a_file_slower_than_the_model_is_refused_and_the_table_says_why_others_are_not_there(
    digits_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(fastest, "CANDIDATES", (PLAIN, CALIBRATED))
    in_milliseconds(monkeypatch, **{PLAIN.name: 5.0, f"{PLAIN.name}, folded": 5.0})
    with pytest.raises(FathomsError) as refused:
        export_fastest(load_run(str(digits_run)).model, tmp_path / "m", judge(calibration=None))
    said = str(refused.value)
    assert "no file is quicker than the model itself (onnxruntime is 0.80 times as quick)" in said
    assert "onnxruntime int8 static: int8 with fixed ranges needs images; give --calibrate DATA" in said
    assert list(tmp_path.iterdir()) == []


def test_speed_is_the_geometric_mean_of_all_timings():
    assert ratio({"1": 4.0, "8": 9.0}, {"1": 1.0, "8": 9.0}) == pytest.approx(2.0)


def test_agreement_is_with_the_model_and_loss_is_of_the_labels():
    own, other = torch.eye(3)[[0, 1, 2, 0]] * 5, torch.eye(3)[[0, 1, 1, 2]] * 5
    found = compared(own, other, torch.tensor([0, 1, 0, 2]), judge())
    assert (found["agreement"], found["drop"], found["difference"]) == (50.0, -25.0, 1.0)


def test_the_table_says_what_is_missing():
    rows = [Tried("model", ms={"1 x 1": 2.0}), Tried("openvino", problem="openvino is not installed")]
    assert fastest.table(rows).splitlines()[-1] == "openvino: openvino is not installed"


def test_candidates_are_timed_in_turns_with_one_and_with_all_threads(monkeypatch):
    seen = []
    monkeypatch.setattr(fastest, "SECONDS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: seen.append(("threads", count)))
    found = fastest.race(
        lambda _: {name: lambda images, name=name: seen.append((name, len(images))) for name in "ab"},
        {1: torch.zeros(1), 8: torch.zeros(8)},
    )
    assert list(found["a"]) == ["1 x 1", "8 x 1", "1 x 2", "8 x 2"]
    timed = seen[1 + 4 : 1 + 4 + 2 * fastest.TURNS]
    assert timed == [("a", 1), ("b", 1)] * fastest.TURNS
    assert [entry for entry in seen if entry[0] == "threads"] == [("threads", n) for n in (1, 2, 2, 2)]


@pytest.mark.compile
def test_validate_and_predict_take_an_openvino_file_in_float_and_int8(digits_run, tmp_path, capsys):
    pytest.importorskip("openvino")
    run, (plain, small) = str(digits_run), (tmp_path / "m.xml", tmp_path / "s.xml")
    assert main(["export", run, "--format", "openvino", "--fold", "--output", str(plain)]) == 0
    words = ["--int8", "digits", "--calibrate", "digits", "--max-drop", "3", "--output", str(small)]
    assert main(["export", run, "--format", "openvino", *words]) == 0
    assert {path.name for path in tmp_path.glob("m*")} == {"m.xml", "m.bin", "m.xml.json", "m.xml.md"}
    images = torch.randn(7, 1, 8, 8)
    model = load_run(run).model
    assert torch.allclose(load_run(plain).model(images), model(images), atol=1e-4)
    capsys.readouterr()
    scores = []
    for checkpoint in (run, plain, small):
        assert main(["validate", "digits", "--checkpoint", str(checkpoint), "--device", "cpu", "--json"]) == 0
        scores += [*json.loads(capsys.readouterr().out)["results"].values()]
    own, same, rounded = (score["top1"] for score in scores)
    assert (same, rounded) == (own, pytest.approx(own, abs=3))
    damaged = bytearray((tmp_path / "m.bin").read_bytes())
    damaged[100] ^= 1
    (tmp_path / "m.bin").write_bytes(damaged)
    with pytest.raises(FathomsError, match=r"m\.bin: is not what m\.xml\.json recorded"):
        load_run(plain)


def test_an_openvino_file_is_refused_without_openvino_or_without_images(tmp_path, monkeypatch):
    model = create_model("vit_digits", depth=1)
    find = onnx_model.importlib.util
    monkeypatch.setattr(find, "find_spec", lambda _: None)
    with pytest.raises(FathomsError, match=r"openvino is not installed; pip install 'fathoms\[openvino\]'"):
        export_model(model, tmp_path / "m.xml", "openvino")
    monkeypatch.setattr(find, "find_spec", lambda name: name)
    with pytest.raises(FathomsError, match="give images with --calibrate DATA"):
        export_model(model, tmp_path / "m.xml", "openvino", int8=judge(calibration=None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.compile
def test_the_command_writes_the_quickest_file(digits_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fastest, "CANDIDATES", (PLAIN,))
    in_milliseconds(monkeypatch, **{f"{PLAIN.name}, folded": 1.0})
    words = ["export", str(digits_run), "--fastest", "digits", "--output", str(tmp_path / "quick")]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["path"], said["folded"] > 0) == (str(tmp_path / "quick.onnx"), True)
    assert [row["name"] for row in said["tried"]] == ["model", PLAIN.name, f"{PLAIN.name}, folded"]
    assert main([*words, "--overwrite"]) == 0
    assert "onnxruntime, folded  1" in capsys.readouterr().out
