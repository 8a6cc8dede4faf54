"""`fathoms bench`: numbers from a real run on the CPU, and mistakes in one line."""

from __future__ import annotations

import json
import time

import pytest

from fathoms.bench import TIMM_SETTINGS, Setting
from fathoms.cli.main import main
from fathoms.cli.terminal.live_output import announced

SMALL = ["vit_digits", "--depth", "2", "--batch-size", "4", "--device", "cpu", "--compile", "none"]
SHORT = ["--turns", "1", "--steps", "1"]


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_it_measures_a_model(capsys, mode):
    assert main(["bench", *SMALL, *SHORT, "--mode", mode, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["mode"] == mode
    how = {"precision": "bf16", "compile": "none", "launch": "eager", "keep": "lean", "mode": "default"}
    assert report["setting"] == how
    row = report["fathoms"]
    assert row["images_per_second"] == pytest.approx(4 / (row["ms"] / 1e3))
    assert report["ratio"] is None


def test_it_says_the_same_to_a_reader(capsys):
    assert main(["bench", *SMALL, *SHORT, "--precision", "fp32"]) == 0
    assert "images/s" in capsys.readouterr().out


def test_a_model_that_timm_has_not_is_no_race(capsys):
    pytest.importorskip("timm", reason="timm is not installed")
    assert main(["bench", "vit_digits", "--device", "cpu", "--against", "timm", "--compile", "none"]) == 2
    assert "no timm model is called 'vit_digits'" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "gains"), [("cait_xxs24_224", True), ("deit3_small_patch16_224", False)])
def test_an_accelerated_model_is_raced_unless_it_gains_nothing(capsys, monkeypatch, model, gains):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    made = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *words, **options: made(*words, depth=1, **options))
    # Compiling takes most of a minute, and the race is the same without it.
    monkeypatch.setitem(TIMM_SETTINGS, "infer", Setting("fp32", "none", "eager"))
    words = [model, "--against", "timm", "--accelerated", "--mode", "infer", "--batch-size", "1", "--json"]
    assert main(["bench", *words, *SHORT, "--device", "cpu", "--compile", "none"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert ("accelerated" in report) is gains
    assert ("accelerated_ratio" in report) is gains
    assert ("gains nothing: it has no talking heads" in printed.err) is not gains
    assert report["ratio"] > 0


def test_long_preparation_is_announced_and_a_quick_one_is_not(capsys):
    with announced("compiling", patience=0.01):
        time.sleep(0.2)
    with announced("never said", patience=60):
        pass
    assert capsys.readouterr().err == "compiling\n"
