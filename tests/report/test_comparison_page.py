"""The page of a comparison or a set of runs: it shows what the folders hold, and names in them stay text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fathoms.report
from fathoms.cli.main import main
from fathoms.models.zoo import model_config
from fathoms.report.arm_views import arms_of, leading, short_names
from fathoms.report.comparison_page import (
    caveats,
    made_by,
    more_seeds,
    question,
    resolution,
    spent,
    status,
    typeset,
)
from fathoms.report.figures import scores_figure
from fathoms.report.html import soft
from fathoms.report.page import write_report
from fathoms.report.records import BESIDE, read_comparison, read_runs
from fathoms.training.job import Job, RunOptions
from fathoms.training.recipe import Recipe
from fathoms.training.run_folder import to_toml
from planted_comparison import GRID, write_comparison, write_run

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=alert(1)>\"'{{7*7}}&"


class Elements(HTMLParser):
    """Names and attributes of all elements, and all text."""

    def __init__(self, text):
        super().__init__()
        self.names, self.attributes, self.text = set(), set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def folder(tmp_path):
    lost = [("norm=dyt, depth=24", 1, "diverged"), ("norm=dyt, depth=12", 2, "failed")]
    return write_comparison(tmp_path / "deep", GRID, lost=lost)


def seen(folder):
    return Elements(write_report(folder).read_text())


def test_the_page_says_the_answer_the_command_and_every_cell(folder):
    page = seen(folder)
    assert "ln, depth 24 leads with a mean top1 of 84.00 over 3 seeds." in page.text
    assert re.search(
        r"fathoms train --config \S+/cells/\S+/config.toml --output runs --experiment ", page.text
    )
    assert "11 of 12 ended, 1 failed" in page.text
    assert "first in the output of blocks.1.mlp" in page.text
    text = (folder / "report.html").read_text()
    assert text.count('data-status="done"') == 10
    for heading in (
        "Arms and runs",
        "Differences between arms",
        "Two axes",
        "Accuracy against cost",
        "Provenance",
    ):
        assert f"<h2>{heading}</h2>" in text


def test_the_first_screen_asks_answers_and_says_what_the_seeds_can_show(folder):
    plan = json.loads((folder / "plan.json").read_text())
    words = ["compare", "photos", "--axis", "norm=ln,dyt", "--by", "8h", "--seeds", "3", "--dry-run"]
    (folder / "plan.json").write_text(json.dumps({**plan, "command": words}))
    comparison = read_comparison(folder)
    arms = arms_of(comparison)
    assert question(arms, comparison) == "Which norm and depth?"
    assert "12 runs: 10 done, 1 diverged, 1 failed" in spent(arms, comparison)
    wanted = ["fathoms", "compare", "photos", "--axis", "norm=ln,dyt", "--seeds", "60"]
    assert more_seeds(comparison, 60) == " ".join(wanted)
    assert "1 run diverged" in caveats(arms, comparison)


def test_the_page_says_whether_these_seeds_could_decide_and_how_many_would(folder):
    comparison = read_comparison(folder)
    row = {"a": "norm=dyt, depth=12", "b": "norm=ln, depth=24", "low": -9.0, "high": -5.0, "n": 3}
    open_ = {**row, "low": -1.0, "high": 3.0, "verdict": "undecided", "more": 7}

    def said(*rows):
        return resolution(dataclasses.replace(comparison, results={"verdicts": list(rows)}))

    decided = {**row, "verdict": "b better"}
    assert said(decided) == (
        "Yes: every pair that was tested is decided. Intervals reach ±2.00 points, and 2.00 points matter.",
        None,
    )
    text, seeds = said(decided, open_, {**open_, "more": 4})
    assert text.startswith("Not all of it: 2 of 3 pairs are undecided. ")
    assert text.endswith("About 7 more seeds of each arm would show that.")
    assert seeds == 10
    assert said(open_, {**open_, "more": None})[1] is None, "no number of seeds would"
    assert said({**row, "low": None, "verdict": "too few seeds"})[0].startswith("No: a verdict needs 3 seeds")


def test_arms_lose_the_words_that_they_share(folder):
    assert [arm.label for arm in arms_of(read_comparison(folder))] == [
        "ln, depth 12",
        "ln, depth 24",
        "dyt, depth 12",
        "dyt, depth 24",
    ]
    same = [{"norm": "ln", "lr": "1e-3"}, {"norm": "ln", "lr": "2e-3"}]
    assert short_names(["norm=ln, lr=1e-3", "norm=ln, lr=2e-3"], same) == ["lr 1e-3", "lr 2e-3"]
    named = [{"norm": "a"}, {"norm": "b"}]
    assert short_names(["mine, too", "yours"], named) == ["mine, too", "yours"], (
        "names of the user's own stay"
    )


def test_an_answer_has_short_names_and_a_minus_before_numbers(folder):
    arms = arms_of(read_comparison(folder))
    told = "no winner: 'norm=ln, depth=12' is at -1.5 (-2.5 to -0.5); exploratory: seeds were added"
    assert typeset(told, arms) == "No winner: “ln, depth 12” is at −1.5 (−2.5 to −0.5). This is exploratory."


def test_runs_that_no_look_asks_for_are_not_awaited(folder):
    cells = read_comparison(folder).cells[:4]
    rows = [
        dataclasses.replace(cell, status=word)
        for cell, word in zip(cells, ["done"] * 3 + ["not needed"], strict=True)
    ]
    assert status(rows) == ("3 runs ended", "good")
    assert status([*rows, dataclasses.replace(cells[0], status="pending")]) == ("3 of 4 ended", "open")


def test_the_same_folder_gives_the_same_page(folder):
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_means_leave_diverged_runs_out_and_intervals_need_three_seeds(folder):
    comparison = read_comparison(folder)
    arms = {arm.name: arm for arm in arms_of(comparison)}
    arm = arms["norm=dyt, depth=24"]
    assert (len(arm.scores), arm.having("diverged"), arm.interval) == (2, 1, None)
    full = arms["norm=ln, depth=24"]
    low, high = full.interval
    # t of 2 degrees of freedom at 97.5 %.
    assert (high - low) / 2 == pytest.approx(4.302653 * full.sd / 3**0.5, rel=1e-5)
    assert leading(list(arms.values()), comparison) is full
    figure = scores_figure(list(arms.values()), comparison)
    told = [text.get_text() for text in figure.axes[0].texts]
    assert told[1] == "best mean"
    assert [text.rpartition(", ")[2] for text in told[5::2]] == ["1 failed", "1 diverged"]
    dots = [points for points in figure.axes[0].collections if len(points.get_offsets())]
    assert sum(len(points.get_offsets()) for points in dots) == 10, "a dot for every run that has a score"


def test_a_mean_of_zero_is_a_mean(folder):
    comparison = read_comparison(folder)
    results = {"arms": [{"name": "norm=ln, depth=24", "mean_with_diverged": 0.0}]}
    comparison = dataclasses.replace(comparison, results={**comparison.results, **results})
    best = leading(arms_of(comparison), comparison)
    assert best.name != "norm=ln, depth=24", "its runs that diverged count at chance"


def test_tuned_values_are_drawn_used_and_marked_at_the_edge(tmp_path):
    trials = [
        {"choice": {"lr": value}, "seed": 1000, "top1": top1}
        for value, top1 in (("1e-4", 60), ("1e-3", 70), ("3e-3", 80))
    ]
    arm = {"name": "norm=ln, depth=24", "best": {"lr": "0.003"}, "edge": ["lr"], "trials": trials}
    tuning = {"grid": {"lr": ["1e-4", "1e-3", "3e-3"]}, "arms": [arm]}
    page = seen(write_comparison(tmp_path / "t", GRID, tuning=tuning))
    assert "Tuning" in page.text
    assert (
        "ln, depth 24: the best lr, 0.003, is at the edge of the grid; a wider one may do better" in page.text
    )


def test_a_best_value_inside_the_grid_is_not_at_its_edge_though_a_trial_beyond_it_diverged(tmp_path):
    trials = [
        {"choice": {"lr": value}, "seed": 1000, "top1": top1}
        for value, top1 in (("0.003", 60), ("0.01", 70), ("1e9", None))
    ]
    arm = {"name": "norm=ln, depth=24", "best": {"lr": "0.01"}, "edge": [], "trials": trials}
    tuning = {"grid": {"lr": ["0.003", "0.01", "1e9"]}, "arms": [arm]}
    page = seen(write_comparison(tmp_path / "t", GRID, tuning=tuning))
    assert "Tuning" in page.text
    assert "edge of the grid" not in page.text


def test_a_plan_that_grew_is_said_to_have_grown(tmp_path):
    grown = [{"command": ["compare"], "arms": ["norm=dyt, depth=24"], "seeds": 3}]
    page = seen(write_comparison(tmp_path / "g", GRID, grown=grown))
    assert "A later command added arms norm=dyt, depth=24" in page.text


def test_a_comparison_has_a_page_before_its_first_result_and_while_runs_go_on(tmp_path):
    folder = write_comparison(tmp_path / "new", GRID, lost=[("norm=ln, depth=12", 0, "pending")])
    assert {cell.status for cell in read_comparison(folder).cells} == {"done", "running"}
    (folder / "results.json").unlink()
    assert "No run has ended yet." in seen(folder).text
    for path in sorted((folder / "cells").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert "No run has ended yet." in seen(folder).text


def test_a_damaged_cell_is_shown_and_the_rest_stays(folder):
    (folder / "cells" / "arm0-seed0" / "metrics.jsonl").write_text("nonsense\n")
    (folder / "cells" / "arm0-seed1" / "probe.jsonl").write_text("nonsense\n")
    assert "12" in seen(folder).text
    assert len(read_comparison(folder).cells) == 12


def test_a_row_cannot_point_outside_its_folder(folder, tmp_path):
    write_run(tmp_path / "elsewhere", score=1.0)
    results = json.loads((folder / "results.json").read_text())
    results["cells"][0]["run"] = "../elsewhere"
    (folder / "results.json").write_text(json.dumps(results))
    assert not read_comparison(folder).cells[0].record.metrics


def test_values_of_the_wrong_kind_are_left_out(folder, monkeypatch):
    monkeypatch.setattr("fathoms.plotting.style._drawn", lambda _figure: "<svg></svg>")
    odd = [None, 3, "x", [], {}, True]
    for name in ("results.json", "plan.json", "timings.json"):
        whole = json.loads((folder / name).read_text())
        for key in whole:
            for value in odd:
                (folder / name).write_text(json.dumps({**whole, key: value}))
                assert shown(folder) == ((0, 0) if key == "cells" else (12, 10)), (name, key, value)
        (folder / name).write_text(json.dumps(dict.fromkeys(whole, "x")))
        assert write_report(folder).is_file()
        (folder / name).write_text(json.dumps(whole))
    results = json.loads((folder / "results.json").read_text())
    for key in results["cells"][0]:
        for value in odd:
            first = {**results["cells"][0], key: value}
            rows = [first, 7, *results["cells"][1:]]
            (folder / "results.json").write_text(json.dumps({**results, "cells": rows}))
            scoreless = key == "status" or (key == "top1" and value != 3)
            assert shown(folder) == (12, 9 if scoreless else 10), (key, value)


def shown(folder):
    """How many runs the page lists, and how many of them it has a score of."""
    comparison = read_comparison(folder)
    arms = arms_of(comparison)
    assert made_by(comparison) is not None
    assert spent(arms, comparison)
    caveats(arms, comparison)
    more_seeds(comparison, resolution(comparison)[1])
    return sum(len(arm.cells) for arm in arms), sum(len(arm.scores) for arm in arms)


@pytest.mark.parametrize(
    "name", [HOSTILE, "x" * 10_000, "\u202egnp.exe\u202c <b>", "ערבית عربي", "\ud800", "a\0b"]
)
def test_hostile_names_stay_text(tmp_path, name):
    arms = {name: ({"norm": name, name: "1"}, 80.0), f"{name}2": ({"norm": "b", name: "2"}, 70.0)}
    planted = {"plain": ({"norm": "a", "depth": "1"}, 60.0), **GRID}
    page = seen(write_comparison(tmp_path / "h", planted, probes=0))
    results = json.loads((tmp_path / "h" / "results.json").read_text())
    for row, (arm, (options, _)) in zip(results["cells"], [*arms.items()] * 3, strict=False):
        row |= {
            "name": arm,
            "arm": options,
            "reason": name,
            "status": "diverged" if row["seed"] == 2 else "done",
        }
    results |= {"answer": name, "verdicts": [{"a": name, "b": name, "low": 1, "high": 2, "verdict": name}]}
    (tmp_path / "h" / "results.json").write_text(json.dumps(results))
    hostile = seen(tmp_path / "h")
    assert hostile.names <= page.names | {"details", "ul", "li", "summary"}
    assert not [key for key in hostile.attributes if key.startswith("on")]
    assert not {"style", "src"} & hostile.attributes
    assert "49" not in hostile.text.split("fathoms comparison")[1][:300]
    assert (tmp_path / "h" / "report.html").stat().st_size < 1_000_000


def test_several_runs_share_a_page_and_seeds_of_one_setting_share_an_arm(tmp_path, monkeypatch, capsys):
    runs = [
        write_run(tmp_path / f"{norm}-{seed}", options={"norm": norm}, seed=seed, score=score)
        for norm, score in (("ln", 80.0), ("dyt", 70.0))
        for seed in range(3)
    ]
    arms = arms_of(read_runs(runs))
    assert [(arm.name, len(arm.cells)) for arm in arms] == [("norm=ln", 3), ("norm=dyt", 3)]
    assert [arm.mean for arm in arms] == [80.0, 70.0]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "written: report.html\n"
    page = Elements((tmp_path / "report.html").read_text())
    assert "not planned as a comparison" in page.text
    assert main(["report", str(tmp_path), "--output", "all.html"]) == 0, (
        "a folder of runs stands for its runs"
    )
    same = [write_run(tmp_path / "again" / name, seed=1) for name in ("one", "two")]
    assert [arm.name for arm in arms_of(read_runs(same))] == ["one", "two"], "equal runs keep their own names"


@pytest.mark.parametrize(
    ("setting", "arms"),
    [
        ({"swap_norms": "learnable_scaler"}, ["swap_norms=none", "swap_norms=learnable_scaler"]),
        ({"initial_checkpoint": "a.pth"}, ["initial_checkpoint=none", "initial_checkpoint=a.pth"]),
        ({"initial_head": "new"}, ["initial_head=load", "initial_head=new"]),
        ({"guard": "skip"}, ["guard=stop", "guard=skip"]),
    ],
)
def test_runs_that_differ_in_a_setting_of_no_table_are_two_arms(tmp_path, setting, arms):
    runs = [write_run(tmp_path / f"{name}-{seed}", seed=seed) for name in ("a", "b") for seed in range(2)]
    for run in runs[2:]:
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(to_toml(setting) + text)
    assert [(arm.name, len(arm.cells)) for arm in arms_of(read_runs(runs))] == [(name, 2) for name in arms]


def test_every_setting_that_decides_a_run_can_make_an_arm():
    options = RunOptions(
        swap_norms="dyt", initial_checkpoint="a", initial_head="new", guard="skip", on_spike="rollback"
    )
    options = dataclasses.replace(options, guard_limit=9, spike_score=3.0)
    decides = Job(None, "vit_digits", model_config("vit_digits"), Recipe(), options).identity()
    assert decides.keys() - {"seed", "model", "config", "recipe"} == BESIDE.keys()


def test_a_folder_without_runs_is_an_error_of_one_line(tmp_path, capsys):
    for words in ([str(tmp_path)], [str(tmp_path), str(tmp_path)], [str(tmp_path / "none")], []):
        assert main(["report", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_text_breaks_after_separators_and_not_inside_numbers():
    assert soft("norm_init/a-b 1.21 1,234") == "norm_<wbr>init/<wbr>a-<wbr>b 1.21 1,234"


def test_the_vendored_library_is_the_published_one():
    vendor = Path(fathoms.report.__file__).parent / "vendor"
    # sha256 of the files in the package uplot 1.6.32 of the npm registry.
    published = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    assert {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in vendor.iterdir()
    } == published
    assert "MIT License" in (vendor / "uPlot.LICENSE").read_text()


def test_the_policy_fits_the_page_and_nothing_is_loaded(folder):
    text = write_report(folder).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    assert "unsafe" not in policy
    outside = set(re.findall(r"https?:[^\s\"'`)]*", text))
    assert outside <= {"https://github.com/leeoniya/uPlot"}, "the library's own name is all"


@pytest.mark.clock
@pytest.mark.slow
@pytest.mark.plain
def test_two_hundred_runs_of_three_hundred_epochs_make_a_page_in_time(tmp_path):
    arms = {
        f"norm={norm}, depth={depth}": ({"norm": f"n{norm}", "depth": str(depth)}, 60.0 + norm)
        for norm in range(8)
        for depth in range(1, 6)
    }
    folder = write_comparison(tmp_path / "large", arms, seeds=5, epochs=300, probes=60)
    began = time.process_time()
    size = write_report(folder).stat().st_size
    assert time.process_time() - began < 20
    assert size < 15_000_000


@pytest.mark.slow
def test_comparing_leaves_the_page_in_the_folder(tmp_path):
    words = [
        "--depth",
        "1",
        "--dim",
        "16",
        "--heads",
        "2",
        "--epochs",
        "1",
        "--batch-size",
        "400",
        "--seeds",
        "1",
    ]
    words += ["--axis", "norm=layernorm,dyt", "--device", "cpu", "--jobs", "1", "--probe-interval", "2"]
    words += ["--output", str(tmp_path), "--experiment", "pair"]
    done = subprocess.run(
        [sys.executable, "-m", "fathoms", "compare", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    page = Elements((tmp_path / "pair" / "report.html").read_text())
    assert "2 runs ended" in page.text
    answer = json.loads((tmp_path / "pair" / "results.json").read_text())["answer"]
    assert answer in " ".join(done.stdout.split()), "the same words as on the terminal"
    assert typeset(answer, arms_of(read_comparison(tmp_path / "pair"))) in page.text
