"""The examples: short, and each says what one learns and how to run it. `make examples` runs them."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_one_learns_and_how_to_run_it(path):
    text = path.read_text()
    page = ast.get_docstring(ast.parse(text))
    assert f"python examples/{path.name}" in page
    assert "You learn " in page or path.name == "serve.py"
    assert len(text.splitlines()) <= 90
    assert '__name__ == "__main__"' in text


def test_what_serves_a_model_imports_neither_fathoms_nor_torch():
    text = (ROOT / "examples" / "serve.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported == {"json", "sys", "pathlib", "numpy", "onnxruntime", "PIL"}


def test_the_notebook_is_kept_with_its_pictures_and_small():
    path = ROOT / "examples" / "pictures.ipynb"
    assert path.stat().st_size < 1_000_000
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) >= 5
    assert not [output for output in outputs if output["output_type"] == "error"]


def test_the_program_that_serves_says_its_usage_without_arguments():
    pytest.importorskip("onnxruntime")
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "serve.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "usage: python examples/serve.py model.onnx photo.jpg ...\n"


def test_photos_in_a_folder_whose_name_has_a_space_stay_one_argument(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: called.append(words))
    monkeypatch.setattr(sys, "argv", ["finetune_photos.py", str(tmp_path / "MY PHOTOS")])
    runpy.run_path(str(ROOT / "examples" / "finetune_photos.py"), run_name="__main__")
    assert [str(tmp_path / "MY PHOTOS") in words for words in called] == [True, False, True, True]
