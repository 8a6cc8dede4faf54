"""The figures of a comparison: SVG files of what the page shows, with names as text."""

import json
import xml.etree.ElementTree as ET

import pytest

from fathoms.report.comparison.figures import OURS
from fathoms.report.page import write_report
from planted_comparison import GRID, write_comparison

SVG = "{http://www.w3.org/2000/svg}"
TRIALS = [
    {"choice": {"lr": value}, "seed": 1000, "top1": top1} for value, top1 in (("1e-4", 60), ("1e-3", 80))
]
TUNING = {
    "grid": {"lr": ["1e-4", "1e-3"]},
    "arms": [{"name": name, "best": {"lr": "1e-3"}, "trials": TRIALS} for name in GRID],
}


def drawn(folder):
    write_report(folder)
    return {path.name: ET.parse(path).getroot() for path in (folder / "figures").iterdir()}


@pytest.fixture
def folder(tmp_path):
    return write_comparison(
        tmp_path / "deep", GRID, lost=[("norm=dyt, depth=24", 1, "diverged")], tuning=TUNING
    )


def test_every_figure_of_the_page_is_a_file(folder):
    found = drawn(folder)
    assert set(found) == {
        *("scores.svg", "tuning.svg", "axes-1-norm-depth.svg"),
        *(f"cost-{name}.svg" for name in ("training-time", "peak-memory", "images-per-second")),
        *(f"curves-{name}.svg" for name in ("val-top1", "val-loss", "train-loss", "train-top1")),
        *(["differences.svg"] if "verdicts" in json.loads((folder / "results.json").read_text()) else []),
    }
    dots = found["scores.svg"].findall(f"{SVG}circle")
    assert len(dots) == 11, "a dot for every run that has a score"
    assert len(found["curves-val-top1.svg"].findall(f"{SVG}polygon")) == len(GRID), "a band for each arm"
    assert len(found["tuning.svg"].findall(f"{SVG}circle")) == 2 * len(GRID)
    assert len(found["axes-1-norm-depth.svg"].findall(f"{SVG}rect")) == 1 + 4


def test_every_shape_lies_on_its_canvas(folder):
    for name, root in drawn(folder).items():
        width, height = float(root.get("width")), float(root.get("height"))
        places = [(float(shape.get("cx")), float(shape.get("cy"))) for shape in root.iter(f"{SVG}circle")]
        places += [(float(shape.get("x")), float(shape.get("y"))) for shape in root.iter(f"{SVG}text")]
        for shape in root.iter(f"{SVG}polyline"):
            places += [tuple(map(float, point.split(","))) for point in shape.get("points").split()]
        assert places
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places), name


def test_hostile_names_are_text_and_old_figures_go(tmp_path):
    name = "</text><script>alert(1)</script>\"'&\x00" + "\u202e" + "x" * 10_000
    folder = write_comparison(tmp_path / "c", {name: ({"a/../b": "1"}, 80.0), "b": ({"a/../b": "2"}, 81.0)})
    (folder / "figures").mkdir()
    (folder / "figures" / "axes-9-old-old.svg").write_text("")
    found = drawn(folder)
    assert "axes-9-old-old.svg" not in found
    assert "scores.svg" in found
    for root in found.values():
        assert {shape.tag.removeprefix(SVG) for shape in root.iter()} <= {
            *("svg", "title", "rect", "line", "text", "circle", "polyline", "polygon")
        }


@pytest.mark.parametrize("epochs", [0, 4], ids=["nothing to draw", "figures"])
def test_files_that_are_not_figures_of_fathoms_stay(tmp_path, epochs):
    lost = [("a", 0, "failed")] if not epochs else []
    folder = write_comparison(
        tmp_path / "c", {"a": ({"norm": "dyt"}, 80.0)}, seeds=1, lost=lost, epochs=epochs
    )
    mine = {"poster.svg", "scores-mine.svg", "axes.svg", "cost.svg", "notes.txt"}
    (folder / "figures").mkdir()
    for name in (*mine, "tuning.svg", "axes-1-norm-depth.svg"):
        (folder / "figures" / name).write_text("mine")
    write_report(folder)
    there = {path.name: path for path in (folder / "figures").iterdir()}
    assert mine <= there.keys()
    assert all(there[name].read_text() == "mine" for name in mine)
    assert not {"tuning.svg", "axes-1-norm-depth.svg"} & there.keys()
    assert ("scores.svg" in there) == bool(epochs)


def test_every_figure_has_a_name_that_a_later_page_removes(folder):
    assert all(OURS.fullmatch(name) for name in drawn(folder))


def test_a_comparison_without_a_score_has_no_figures(tmp_path):
    folder = write_comparison(
        tmp_path / "c", {"a": ({"norm": "dyt"}, 80.0)}, seeds=1, lost=[("a", 0, "failed")], epochs=0
    )
    write_report(folder)
    assert not (folder / "figures").exists()


def test_a_value_at_which_an_arm_diverged_is_in_its_legend_and_on_the_page(tmp_path):
    name = next(iter(GRID))
    lost = {"choice": {"lr": "3e-3"}, "seed": 1000, "top1": None, "status": "diverged"}
    arms = [{**arm, "trials": [*TRIALS, lost]} if arm["name"] == name else arm for arm in TUNING["arms"]]
    folder = write_comparison(tmp_path / "deep", GRID, tuning={**TUNING, "arms": arms})
    texts = [text.text for text in drawn(folder)["tuning.svg"].iter(f"{SVG}text")]
    assert [text for text in texts if "diverged" in text] == [f"{name}, diverged at lr 3e-3"]
    page = (folder / "report.html").read_text().replace("<wbr>", "")
    assert f"{name}: diverged at lr 3e-3" in page
