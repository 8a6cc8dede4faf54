"""The documentation site: links that hold, a navigation that names every page, a strict build."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path):
    """A small repository with a page that links to another, to a file and to a room."""
    for name, text in {
        "README.md": "[a](docs/a.md#b) ![p](docs/p.svg)",
        "docs/a.md": "[up](../README.md) [code](../src/x.py)\n\n```\n[no](link.md)\n```\n",
        "docs/p.svg": "<svg/>",
        "src/x.py": "1",
        "results/r.md": "",
        "website/assets/site.css": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def stage(script, monkeypatch):
    module = script("stage")
    monkeypatch.setattr(module, "ROOT_PAGES", {"README.md": "index.md"})
    return module


def test_links_are_turned_to_where_pages_and_files_stand_on_the_site(stage, repository, tmp_path):
    pages = stage.stage(repository, tmp_path / "out")
    assert pages == ["a.md", "index.md", "results/r.md"]
    assert (tmp_path / "out/index.md").read_text() == "[a](a.md#b) ![p](files/docs/p.svg)"
    turned = (tmp_path / "out/a.md").read_text()
    assert turned == "[up](index.md) [code](files/src/x.py.txt)\n\n```\n[no](link.md)\n```\n"
    assert (tmp_path / "out/files/src/x.py.txt").read_text() == "1"


def test_the_page_of_a_run_comes_with_the_files_that_it_links_to(stage, repository, tmp_path):
    (repository / "docs/a.md").write_text("[page](../results/report.html)")
    (repository / "results/report.html").write_text(
        '<a href="./config.toml">config</a> <a href="gone.csv">csv</a>'
    )
    (repository / "results/config.toml").write_text("seed = 1")
    stage.stage(repository, tmp_path / "out")
    assert (tmp_path / "out/files/results/config.toml").read_text() == "seed = 1"
    assert not (tmp_path / "out/files/results/gone.csv").exists()


def test_a_link_to_nothing_is_an_error_that_names_page_and_link(stage, repository, tmp_path):
    (repository / "docs/a.md").write_text("[gone](gone.md)")
    with pytest.raises(stage.DeadLinkError, match=r"docs/a.md: there is no gone.md to link to"):
        stage.stage(repository, tmp_path / "out")


def test_dead_files_and_anchors_of_a_built_site_are_found(script, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="a/#there">1</a> <a href="a/#not">2</a> <a href="b/">3</a> <img src="c.png"> <a href="https://x.y/">4</a>'
    )
    (tmp_path / "a" / "index.html").write_text('<h2 id="there"></h2><a href="../index.html">5</a>')
    found = script("links").dead_links(tmp_path)
    assert found == ["index.html: a/#not", "index.html: b/", "index.html: c.png"]


def test_the_navigation_names_every_guide_and_no_other_page(script, tmp_path):
    build, pages = script("build"), script("stage").stage(ROOT, tmp_path)
    project = tomllib.loads(build.configured(ROOT))["project"]
    guides = {page for page in pages if not page.startswith(("results/", "source/"))}
    assert build.in_navigation(project["nav"]) == guides


def test_the_site_names_an_address_of_its_own_only_where_one_is_given(script):
    build = script("build")
    plain, published = (
        tomllib.loads(build.configured(ROOT, url))["project"] for url in ("", "https://example.org/fathoms/")
    )
    assert "site_url" not in plain
    assert published == {**plain, "site_url": "https://example.org/fathoms/"}


SEARCHED = {
    "tutorial": "tutorial_photos.md",
    "quickstart": "start.md",
    "windows": "start.md",
    "docker": "start.md",
    "gallery": "gallery.md",
    "confidence interval": "compare.md",
    "p-value": "compare.md",
    "significance": "compare.md",
    "quantization": "ship.md",
    "huggingface": "ship.md",
    "gradient clipping": "training.md",
    "cite": "index.md",
    "fine-tune": "training.md",
    "learning rate": "tutorial_deep.md",
    "slurm": "many_runs.md",
    "onnx": "ship.md",
    "layerscale": "switches.md",
}
"""What people type into a search box, and the page that answers."""


def test_the_words_people_search_for_are_on_the_page_that_answers(script, tmp_path):
    script("stage").stage(ROOT, tmp_path)
    texts = {page: " ".join((tmp_path / page).read_text().lower().split()) for page in SEARCHED.values()}
    assert {word: page for word, page in SEARCHED.items() if word not in texts[page]} == {}


def test_no_page_of_the_site_loads_anything_from_elsewhere(script, tmp_path):
    pages = script("stage").stage(ROOT, tmp_path)
    loaded = re.compile(r"!\[[^\]]*\]\(https?:|<(?:img|script|link)[^>]*https?:|@import|url\(https?:")
    theme = [ROOT / "website" / "theme" / "main.html", ROOT / "website" / "assets" / "site.css"]
    texts = {str(path): path.read_text() for path in [*theme, *(tmp_path / page for page in pages)]}
    assert [path for path, text in texts.items() if loaded.search(text)] == []
