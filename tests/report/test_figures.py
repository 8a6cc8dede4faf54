"""The figures of a comparison: SVG files of what the page shows, with names as text."""

import json
import xml.etree.ElementTree as ET

import pytest

from fathoms.report.arm_views import arms_of
from fathoms.report.figures import OURS, against, differences_figure, figures
from fathoms.report.page import write_report
from fathoms.report.records import read_comparison
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


def test_figures_show_the_numbers_of_the_comparison(folder):
    comparison = read_comparison(folder)
    made = figures(comparison)
    bands = made["curves-val-top1"].axes[0].collections
    assert len(bands) == len(GRID), "a band for each arm"
    lines = made["tuning"].axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [[60.0, 80.0]] * len(GRID)
    squares = made["axes-1-norm-depth"].axes[0]
    means = {arm.name: f"{arm.mean:.2f}" for arm in arms_of(comparison)}
    assert [text.get_text() for text in squares.texts] == list(means.values())


def test_a_difference_is_told_with_the_better_arm_first(folder):
    results = json.loads((folder / "results.json").read_text())
    row = {"a": "norm=dyt, depth=12", "b": "norm=ln, depth=24", "difference": -7.0, "low": -9.0, "high": -5.0}
    row |= {"verdict": "b better", "p": 0.01, "win_share": 0.1}
    (folder / "results.json").write_text(json.dumps({**results, "verdicts": [row]}))
    comparison = read_comparison(folder)
    axes = differences_figure(arms_of(comparison), comparison).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ln, depth 24 − dyt, depth 12"]
    assert [text.get_text() for text in axes.texts] == [
        "+7.00 (+5.00 to +9.00)",
        "the first is better, p = 0.01, ahead in 90% of pairs of runs",
    ]


def test_each_arm_is_told_against_the_best_one(folder):
    results = json.loads((folder / "results.json").read_text())
    row = {"a": "norm=dyt, depth=12", "b": "norm=ln, depth=24", "difference": -7.0, "low": -9.0, "high": -5.0}
    verdicts = [{**row, "verdict": "b better"}, {**row, "a": "norm=ln, depth=24", "b": "norm=ln, depth=12"}]
    verdicts[1] |= {"difference": 2.0, "low": -1.0, "high": 5.0, "verdict": "undecided"}
    (folder / "results.json").write_text(json.dumps({**results, "verdicts": verdicts}))
    comparison = read_comparison(folder)
    arms = {arm.label: arm for arm in arms_of(comparison)}
    best = arms["ln, depth 24"]
    told = {name: against(arm, best, comparison) for name, arm in arms.items()}
    assert told == {
        "ln, depth 24": "best mean",
        "ln, depth 12": "−2.00 (−5.00 to +1.00)   undecided",
        "dyt, depth 12": "−7.00 (−9.00 to −5.00)   worse",
        "dyt, depth 24": "untested",
    }


def test_hostile_names_are_text_and_old_figures_go(tmp_path):
    name = "</text><script>alert(1)</script>\"'&\x00" + "\u202e" + "x" * 10_000
    folder = write_comparison(tmp_path / "c", {name: ({"a/../b": "1"}, 80.0), "b": ({"a/../b": "2"}, 81.0)})
    (folder / "figures").mkdir()
    (folder / "figures" / "axes-9-old-old.svg").write_text("")
    found = drawn(folder)
    assert "axes-9-old-old.svg" not in found
    assert "scores.svg" in found
    drawn_by_us = {"svg", "title", "g", "path", "text", "defs", "use", "clipPath", "rect", "image"}
    for root in found.values():
        assert {shape.tag.removeprefix(SVG) for shape in root.iter()} <= drawn_by_us


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
    assert [text for text in texts if "diverged" in text] == ["ln, depth 12, diverged at lr 3e-3"]
    page = (folder / "report.html").read_text().replace("<wbr>", "")
    assert "ln, depth 12: diverged at lr 3e-3" in page
