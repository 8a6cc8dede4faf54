"""Every kind of data set goes through check, info, train and validate."""

import json
import subprocess
import sys

import pytest

from fathoms.cli.main import main
from fathoms.data.sources.splits import READERS
from tiny_data import MAKERS

TINY = ["--recipe", "digits", "--depth", "1", "--dim", "16", "--heads", "2", "--in-channels", "3"]
TINY += ["--image-size", "16", "--patch-size", "8", "--epochs", "1", "--device", "cpu", "--experiment", "run"]
# What is called test is not val: val is then carved from train, an image of each class.
CARVED = ("idx", "cifar")


@pytest.mark.parametrize("kind", list(READERS))
def test_a_data_set_is_checked_shown_trained_on_and_validated(kind, tmp_path, capsys):
    path = MAKERS[kind](tmp_path)
    held_out = {"idx": "t10k", "cifar": "test"}.get(kind, "val")

    def answer(*words):
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    checked = answer("data", "check", str(path))
    assert (checked["files"], checked["bad"], checked["across_splits"]) == (9, [], [])
    shown = answer("data", "info", str(path))
    assert {name: split["images"] for name, split in shown["splits"].items()} == {"train": 6, held_out: 3}
    summary = answer("train", str(path), *TINY, "--output", str(tmp_path / "runs"))
    assert summary["status"] == "done"
    assert summary["last"]["images"] == 3
    assert (summary["test"] is not None) == (kind in CARVED)
    result = answer("validate", "--checkpoint", str(tmp_path / "runs/run"), "--device", "cpu")
    measured = result["results"][str(path)]
    assert measured["images"] == 3
    same = summary["test"] if kind in CARVED else summary["best"]
    assert measured["loss"] == pytest.approx(same["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "hub"])
def test_a_data_set_is_shown_without_importing_torch(kind, tmp_path):
    path = MAKERS[kind](tmp_path)
    code = f"import sys; from fathoms.cli.main import main; main(['data', 'info', {str(path)!r}]); "
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
