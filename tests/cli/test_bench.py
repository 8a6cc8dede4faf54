"""`fathoms bench`: numbers from a real run on the CPU, and mistakes in one line."""

from __future__ import annotations

import json
import time

import pytest

from fathoms.cli.main import main
from fathoms.cli.terminal.progress import announced

SMALL = ["vit_digits", "--depth", "2", "--batch-size", "4", "--device", "cpu", "--compile", "none"]
SHORT = ["--turns", "1", "--steps", "1"]


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_it_measures_a_model(capsys, mode):
    assert main(["bench", *SMALL, *SHORT, "--mode", mode, "--keep", "all", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["mode"] == mode
    how = {"precision": "bf16", "compile": "none", "launch": "eager", "keep": "all", "mode": "default"}
    assert report["setting"] == how
    row = report["fathoms"]
    assert row["images_per_second"] == pytest.approx(4 / (row["ms"] / 1e3))
    assert report["ratio"] is None


def test_it_says_the_same_to_a_reader(capsys):
    assert main(["bench", *SMALL, *SHORT, "--precision", "fp32"]) == 0
    assert "images/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SMALL, "--launch", "graph"], "needs a CUDA device; use eager"),
        ([*SMALL, "--against", "timm"], "no model with these switches"),
        (["vit_digits", "--batch-size", "0"], "--batch-size 0: use 1 or more"),
        (
            ["vit_digits", "--device", "cpu", "--against", "timm", "--compile", "none"],
            "no timm model is called",
        ),
        (["vit_digts"], "did you mean 'vit_digits'"),
    ],
)
def test_mistakes_are_one_line(capsys, words, message):
    pytest.importorskip("timm", reason="timm is not installed")
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1


def test_long_preparation_is_announced_and_a_quick_one_is_not(capsys):
    with announced("compiling", patience=0.01):
        time.sleep(0.2)
    with announced("never said", patience=60):
        pass
    assert capsys.readouterr().err == "compiling\n"
