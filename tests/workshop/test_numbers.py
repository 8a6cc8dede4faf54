"""Generated texts, figures and pages: website/generate.py writes them and finds those that are not as it wrote them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def generate(root, *options):
    command = [sys.executable, str(ROOT / "website" / "generate.py"), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the pages and of the results."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("README.md", "RELIABILITY.md"):
        shutil.copy(ROOT / name, place)
    for name in ("docs", "results"):
        shutil.copytree(ROOT / name, place / name)
    return place


def test_what_is_edited_missing_or_of_an_older_result_is_found_and_written_again(checkout):
    kept = {path: path.read_text() for path in checkout.rglob("*") if path.suffix in (".md", ".svg")}
    result = checkout / "results" / "models.json"
    report = json.loads(result.read_text())
    ratio = f"{report['rows']['cait_s24_224']['ratio']:.2f}"
    report["rows"]["cait_s24_224"]["ratio"] = 1.23
    result.write_text(json.dumps(report))
    figures = checkout / "results" / "compare" / "stem_patch8" / "figures"
    (figures / "scores.svg").write_text(kept[figures / "scores.svg"].replace("62.17", "92.17", 1))
    (figures / "differences.svg").unlink()
    claims, recipes = checkout / "docs" / "claims.md", checkout / "docs" / "recipes.md"
    claims.write_text(claims.read_text().replace("times as fast per core", "times as slow per core"))
    recipes.write_text("edited")
    edited = {claims: claims.read_text(), recipes: recipes.read_text()}
    checked = generate(checkout, "--check")
    assert checked.returncode == 1
    assert {line.partition(":")[0] for line in checked.stdout.splitlines()} == {
        *("README.md", "docs/claims.md", "docs/recipes.md", "docs/speed.md"),
        *(f"results/compare/stem_patch8/figures/{name}.svg" for name in ("scores", "differences")),
    }
    assert {path: path.read_text() for path in edited} == edited
    assert generate(checkout).returncode == 0
    assert generate(checkout, "--check").returncode == 0
    for path, text in kept.items():
        changed = path in (checkout / "README.md", checkout / "docs" / "speed.md")
        assert (path.read_text() == text) is not changed, path
    assert (
        kept[checkout / "README.md"].replace(f"{ratio} times", "1.23 times")
        == (checkout / "README.md").read_text()
    )


def test_every_marker_has_a_generator_and_every_generator_a_marker(script):
    generator = script("generate")
    texts = [page.read_text() for page in generator.written_by_hand(ROOT)]
    assert {found["name"] for text in texts for found in generator.MARKED.finditer(text)} == set(
        generator.TEXTS
    )
    # Markdown would take a whole line that begins with a marker for HTML.
    for text in texts:
        assert not re.findall(r"^<!-- (?:generated: [\w-]+|end) -->.*\S.*$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a <!-- generated: spede-claim --><!-- end -->", "nothing generates 'spede-claim'"),
        ("a <!-- generated: soak -->", "has no name or no end"),
        ("a <!-- generated: soak --> b <!-- generated: fuzz --><!-- end -->", "has no name or no end"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_an_error_that_names_the_page(script, line, reason):
    generator = script("generate")
    with pytest.raises(ValueError, match=f"docs/data.md: .*{reason}"):
        generator.fill(f"{line}\n", generator.reader(ROOT), "docs/data.md")
