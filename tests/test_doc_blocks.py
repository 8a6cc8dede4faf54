"""The code blocks of the pages are found, with the reasons of those that are not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from doc_blocks import blocks_of, broken_promises

ROOT = Path(__file__).parents[1]
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

```console
$ fathoms --version
0.2.0
```

```
speed: bf16, blocks compiled
```
"""


def test_blocks_have_their_kind_their_line_and_their_reason(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    blocks = blocks_of(tmp_path / "page.md")
    assert [block.kind for block in blocks] == ["python", "shell", "shell", "shell", "text"]
    assert [block.line for block in blocks] == [3, 7, 15, 19, 24]
    assert [block.not_run for block in blocks] == ["", "", "needs a GPU", "", ""]
    assert [command.text for command in blocks[1].commands] == [
        "fathoms train photos/  --epochs 1",
        "fathoms models 'cait_*'",
    ]
    assert blocks[3].commands[0].promised == ("0.2.0",)


@pytest.mark.parametrize(
    ("promised", "kept"),
    [
        ("top1 97.2 of 360 images", True),
        ("top1 60.0 of 360 images", False),
        ("top5 97.2 of 360 images", False),
        ("written to ...", True),
        ("read from ...", False),
    ],
)
def test_a_promised_line_is_kept_with_numbers_within_the_tolerance(promised, kept):
    printed = "epoch 1\ntop1   96.9 of 360 images\nwritten to runs/a/report.html\n"
    assert (broken_promises((promised,), printed) == []) is kept


def test_every_page_of_the_documentation_closes_its_blocks():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        fences = [line for line in text.splitlines() if line.lstrip().startswith("```")]
        assert len(fences) == 2 * len(blocks_of(page)), page
