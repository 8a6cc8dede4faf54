"""Keyword arguments of create_model and load_run: known to editors and checkers, and equal to ViTConfig's fields."""

from __future__ import annotations

import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import fathoms
from fathoms.models.config import AllFields, Overrides, ViTConfig


def test_the_overrides_are_the_fields_of_the_config():
    fields = typing.get_type_hints(ViTConfig)
    assert typing.get_type_hints(AllFields) == fields
    assert fields.keys() - typing.get_type_hints(Overrides).keys() == {"num_classes", "image_size"}


def test_a_checker_refuses_a_misspelt_override(tmp_path):
    checker = shutil.which("pyrefly", path=Path(sys.executable).parent)
    if checker is None:
        pytest.skip("pyrefly is not installed")
    lines = {
        "right": 'import fathoms\nfathoms.create_model("vit_digits", norm="dyt", depth=3)\n',
        "name": 'import fathoms\nfathoms.create_model("vit_digits", nrom="dyt")\n',
        "run": 'import fathoms\nfathoms.load_run("runs/x", deph=3)\n',
    }
    source = str(Path(fathoms.__file__).parents[1])
    for name, text in lines.items():
        (tmp_path / f"{name}.py").write_text(text)
        words = ["check", str(tmp_path / f"{name}.py"), "--search-path", source]
        words += ["--python-interpreter-path", sys.executable]
        done = subprocess.run([checker, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (done.returncode == 0) is (name == "right"), done.stdout
