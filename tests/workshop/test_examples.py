"""Examples and the code blocks of pages, which `make examples` runs."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from doc_blocks import blocks_of, differing, told
from run_examples import elsewhere

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize(("name", "pictures"), [("pictures", 5), ("notebook", 4)])
def test_a_notebook_is_kept_with_its_pictures_and_small(name, pictures):
    path = ROOT / "examples" / f"{name}.ipynb"
    assert path.stat().st_size < 1_000_000
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) >= pictures
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


PAGE = """
```python
import fathoms
```

```
fathoms train photos/ \\
  --epochs 1            # a comment
fathoms models 'cait_*'
```

<!-- not run: needs a GPU -->

```bash
fathoms bench cait_s24_224
```

```bash
fathoms --version
```

```output
0.2.0
```

```
speed: bf16, blocks compiled
```
"""


def test_blocks_have_their_kind_their_line_their_reason_and_their_output(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    blocks = blocks_of(tmp_path / "page.md")
    assert [block.kind for block in blocks] == ["python", "shell", "shell", "shell", "text"]
    assert [block.line for block in blocks] == [3, 7, 15, 19, 27]
    assert [block.not_run for block in blocks] == ["", "", "needs a GPU", "", ""]
    assert blocks[1].commands == ["fathoms train photos/  --epochs 1", "fathoms models 'cait_*'"]
    assert [block.printed and (block.printed.line, block.printed.code) for block in blocks] == [
        *(None, None, None, (23, "0.2.0\n"), None)
    ]


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        ("top1 96.9 of 360 images in 3.2 s", True),
        ("top1 93.2 of 360 images in 812 s", True),
        ("top1 60.0 of 360 images in 3.2 s", False),
        ("top1 96.9 of 300 images in 3.2 s", False),
        ("top5 96.9 of 360 images in 3.2 s", False),
        ("top1   96.9 of 360 images in 3 s", True),
        ("top1 96.9 of 360 images", False),
    ],
)
def test_a_shown_line_has_the_words_of_the_run_and_numbers_that_vary_little(shown, same):
    assert (differing([shown], ["top1 96.9 of 360 images in 4.1 s"]) == []) is same


def test_a_line_too_many_and_one_too_few_differ():
    assert differing(["a", "b"], ["a"]) == ["- b"]
    assert differing(["a"], ["a", "b"]) == ["+ b"]
    assert differing(["off by 7.4e-08  | -- |"], ["off by 1.2e-07 | ---- |"]) == []


def test_an_output_keeps_the_shape_that_the_page_gives_it_and_no_line_of_the_clock():
    printed = "\none\n12% 0:10 left  epoch 1/6\ntwo  \nthree\n    goes on\nfour\nfive 5\n\n"
    assert told(printed) == ["one", "two", "three", "    goes on", "four", "five 5"]
    assert told(printed, "x\n...\ny\nz\n") == ["one", "...", "four", "five 5"]
    assert told(printed, "...\nthree\n") == ["...", "three", "    goes on", "four", "five 5"]
    assert told(printed, "...\nthree\n    went\n...\n") == ["...", "three", "    goes on", "..."]


GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_block_of_a_guide_shows_what_it_prints_or_says_why_it_is_not_run(page):
    silent = [
        block
        for block in blocks_of(page)
        if block.kind in ("python", "shell") and block.printed is None and not elsewhere(block)
    ]
    assert [block.line for block in silent] == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_code_of_a_guide_is_at_most_88_columns_wide(page):
    narrow = 42 if page.name == "README.md" else 88
    lines = [line for block in blocks_of(page) if block.kind != "text" for line in block.code.splitlines()]
    if page.name == "commands.md":
        pytest.skip("the examples of --help")
    assert [line for line in lines if len(line) > narrow] == []


def test_every_page_of_the_documentation_closes_its_blocks():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        fences = [line for line in text.splitlines() if line.lstrip().startswith("```")]
        assert len(fences) == 2 * sum(1 + (block.printed is not None) for block in blocks_of(page)), page
