"""The examples: short, and each says what one learns and how to run it. `make examples` runs them."""

from __future__ import annotations

import ast
import json
import re
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
