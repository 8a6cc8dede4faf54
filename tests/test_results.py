"""Measured numbers on the pages: benchmarks/doc_numbers.py writes them from results/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fathoms.compare.results import as_csv, as_table, judged

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "doc_numbers.py"


def generate(root, *options):
    command = [sys.executable, str(SCRIPT), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the pages and of the results."""
    for name in ("README.md", "RELIABILITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "results"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def doc_numbers(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    import doc_numbers

    yield doc_numbers
    for name in set(sys.modules) - before:
        if name.startswith("doc_"):
            del sys.modules[name]


def test_the_pages_hold_the_numbers_of_results():
    done = generate(ROOT, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_changed_result_changes_the_pages(checkout):
    path = checkout / "results" / "models.json"
    report = json.loads(path.read_text())
    report["rows"]["cait_s24_224"]["ratio"] = 1.23
    path.write_text(json.dumps(report))
    kept = (checkout / "README.md").read_text()
    checked = generate(checkout, "--check")
    assert checked.returncode == 1
    assert [line.partition(":")[0] for line in checked.stdout.splitlines()] == ["README.md", "docs/speed.md"]
    assert (checkout / "README.md").read_text() == kept
    assert generate(checkout).returncode == 0
    assert "1.23 times" in (checkout / "README.md").read_text()
    assert "1.23×" in (checkout / "docs" / "speed.md").read_text()
    assert generate(checkout, "--check").returncode == 0


def test_an_edited_number_is_found(checkout):
    page = checkout / "docs" / "speed.md"
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| cait_s24_224, training"))
    page.write_text(text.replace(row, row.replace("images/s", "pictures/s")))
    assert generate(checkout, "--check").returncode == 1
    assert generate(checkout).returncode == 0
    assert page.read_text() == text


def test_every_marker_has_a_generator_and_every_generator_a_marker(doc_numbers):
    named = {name for page in doc_numbers.pages(ROOT) for name in doc_numbers.names_in(page.read_text())}
    assert named == set(doc_numbers.TEXTS)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a <!-- generated: spede-claim --><!-- end -->", "nothing generates 'spede-claim'"),
        ("a <!-- generated: soak -->", "has no name or no end"),
        ("a <!-- generated: soak --> b <!-- generated: fuzz --><!-- end -->", "has no name or no end"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_an_error_that_names_the_page(checkout, line, reason):
    page = checkout / "docs" / "data.md"
    page.write_text(f"{page.read_text()}\n{line}\n")
    done = generate(checkout)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("docs/data.md: ")
    assert reason in done.stderr


def test_no_line_of_text_begins_with_a_marker(doc_numbers):
    """Markdown would take the whole line for HTML."""
    for page in doc_numbers.pages(ROOT):
        begun = re.findall(r"^<!-- (?:generated: [\w-]+|end) -->.*\S.*$", page.read_text(), re.MULTILINE)
        assert begun == []


def test_a_figure_that_is_edited_or_missing_is_found_and_drawn_again(checkout):
    figures = checkout / "results" / "compare" / "stem_patch8" / "figures"
    drawn = (figures / "scores.svg").read_text()
    (figures / "scores.svg").write_text(drawn.replace("<circle", "<circle r='9'", 1))
    (figures / "differences.svg").unlink()
    checked = generate(checkout, "--check")
    assert checked.returncode == 1
    assert [Path(line.partition(":")[0]).name for line in checked.stdout.splitlines()] == [
        "scores.svg",
        "differences.svg",
    ]
    assert generate(checkout).returncode == 0
    assert (figures / "scores.svg").read_text() == drawn
    assert generate(checkout, "--check").returncode == 0


COMPARISONS = sorted(path.parent for path in (ROOT / "results" / "compare").glob("*/results.json"))


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: folder.name)
def test_published_verdicts_are_those_that_the_runs_get_today(folder):
    plan, kept = (json.loads((folder / f"{name}.json").read_text()) for name in ("plan", "results"))
    now = judged(kept["cells"], plan, folder)
    assert now["answer"] == kept["answer"]
    assert [arm["name"] for arm in now["arms"]] == [arm["name"] for arm in kept["arms"]]
    for here, there in zip(now["arms"] + now["verdicts"], kept["arms"] + kept["verdicts"], strict=True):
        for key, value in here.items():
            # The bits of each image are not published for all runs.
            if key == "new_images" and value is None:
                continue
            exact = isinstance(value, str | None) or key == "diverged_interval"
            assert there[key] == (value if exact else pytest.approx(value, rel=1e-9)), (folder.name, key)
    assert (folder / "table.md").read_text() == as_table(kept)
    assert (folder / "results.csv").read_text() == as_csv(kept)
