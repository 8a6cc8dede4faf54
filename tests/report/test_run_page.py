"""Sections of a run's page: origin, updates, guard events, classes and examples, from untrusted files."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from fathoms.report.confusions import MATRIX, evaluated, examples
from fathoms.report.page import write_report
from fathoms.report.records import RunRecord, read_run
from fathoms.report.run_page import (
    MOST_POINTS,
    answer,
    by_update,
    command,
    guard_events,
    model_words,
    next_commands,
)
from fathoms.training.run_folder import to_toml
from planted_comparison import write_run

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=alert(1)>\"'"


def png(side=16):
    file = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def folder(tmp_path):
    """A run folder with everything that a run records."""
    run = write_run(tmp_path / "run", probes=2, blocks=3)
    start = {"time": "2026-01-02T03:04:05+00:00", "host": "deep-1", "folder": "/w"}
    start["command"] = ["fathoms", "train", "my data"]
    machine = {"version": 2, "gpu": "H200", "gpu_memory": 150e9, "memory": 2e12, "cores": 16, "threads": 8}
    machine |= {"commit": "a" * 40, "versions": {"torch": "2.15"}, "starts": [start, start]}
    (run / "environment.json").write_text(json.dumps(machine))
    rows = [{"version": 2, "update": 1, "loss": [3.0, 2.0], "gradient_norm": [1.0, None]}]
    rows += [{"version": 2, "update": 4, "loss": [1.0], "gradient_norm": [0.5]}]
    (run / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"version": 2, "kind": "not_finite", "act": "skip", "epoch": 1, "update": 3, "loss": None}
    event |= {"cause": {"layer": "blocks.1.mlp", "gradient": None, "files": ["a.jpg", HOSTILE, "c", "d"]}}
    (run / "guard.jsonl").write_text(json.dumps(event) + "\n")
    (run / "evaluation.json").write_text(
        json.dumps({"version": 2, "split": "test", "confusion": [[0, 0, 6], [0, 1, 2], [1, 1, 8]]})
    )
    shown = [{"name": HOSTILE, "label": 0, "top": [[1, 0.9], [0, 0.1]], "png": png()}]
    shown += [{"name": "b", "label": 1, "top": [[1, 0.75]], "png": png(100)}]
    (run / "examples.json").write_text(json.dumps({"version": 2, "split": "test", "examples": shown}))
    return run


def test_the_page_shows_origin_updates_events_classes_and_examples(folder):
    text = write_report(folder).read_text().replace("<wbr>", "")
    for title in (
        "By update",
        "Events of the guard",
        "Classes",
        "Held-out images",
        "Norms by layer",
        "Origin",
    ):
        assert f"<h2>{title}" in text or f"<h3>{title}" in text
    for part in ("2026-01-02 03:04:05 UTC", "deep-1", "H200, 150.0 GB", "8 on 16 cores", "1 time, last"):
        assert part in text
    assert "fathoms train" in command(read_run(folder))
    assert command(read_run(folder)).endswith("'my data'")
    assert "img-src data:; " in text
    assert text.count('src="data:image/png;base64,') == 2
    assert "document.title='pwned'</script>" not in text
    assert "<img src=x" not in text


def test_losses_are_drawn_by_update_and_many_are_averaged(folder):
    rows = read_run(folder).updates
    assert by_update(rows, "loss") == [(1.0, 3.0), (2.0, 2.0), (4.0, 1.0)]
    assert by_update(rows, "gradient_norm") == [(1.0, 1.0), (2.0, None), (4.0, 0.5)]
    many = by_update([{"update": 1, "loss": [1.0, 3.0] * 5000}], "loss")
    assert len(many) <= MOST_POINTS
    assert [value for _, value in many[:-1]] == [pytest.approx(2.0, abs=0.1)] * (len(many) - 1)
    assert by_update([{"update": "x", "loss": [1.0]}, {"update": 2, "loss": "y"}], "loss") == []


def test_events_name_place_action_and_cause(folder):
    (event,), count = guard_events(read_run(folder).guard)
    assert count == 1
    assert (event.place, event.kind, event.act) == (
        "epoch 1, update 3",
        "not a finite number",
        "update skipped",
    )
    assert event.cause.startswith("blocks.1.mlp; images a.jpg, ")
    assert event.cause.endswith("c and 1 more")


def test_classes_come_hardest_first_with_their_mistakes(folder):
    made = evaluated(read_run(folder))
    assert [(row.name, row.images, row.accuracy, row.mistake) for row in made.classes] == [
        ("cat", 8, 75.0, "dog (2)"),
        ("dog", 8, 100.0, ""),
    ]
    assert made.confusions == [("cat", "dog", 2, 25.0)]
    assert made.matrix[0] == ("cat", [(6, 5), (2, 2)])
    many = {"classes": [str(i) for i in range(MATRIX + 1)]}
    assert evaluated(RunRecord("x", many, evaluation={"confusion": [[0, 1, 1]]})).matrix == []
    odd = {"confusion": [[0, 9, 1], "x", [0, 1], [0, -1, 2], [True, 0, 0]]}
    assert evaluated(RunRecord("x", {"classes": ["a", "b"]}, evaluation=odd)) is None


def test_only_a_small_png_becomes_an_image(folder):
    config = {"classes": ["cat", "dog"]}
    good = {"name": "a", "label": 0, "top": [[0, 0.5]], "png": png()}
    bad = [
        {**good, "png": "javascript:alert(1)"},
        {**good, "png": base64.b64encode(b"<svg onload=alert(1)>" * 3).decode()},
        {**good, "png": png() + '" onerror="x'},
        {**good, "png": png(600)},
        {**good, "label": 7},
        {**good, "label": True},
        {**good, "top": []},
        {**good, "png": None},
    ]
    record = RunRecord("x", config, examples={"examples": [*bad, good, "x"]})
    assert [(one.label, one.right, one.small) for one in examples(record)] == [("cat", True, True)]
    assert [one.right for one in examples(read_run(folder))] == [False, True]


def test_a_model_goes_by_its_shape_where_that_is_known():
    shape = {"name": "vit_tiny_patch16_224", "dim": 48, "depth": 12, "heads": 3, "patch_size": 16}
    assert model_words(RunRecord("x", {"model": shape})) == "12 blocks of 48 channels, patch 16"
    assert model_words(RunRecord("x", {"model": {"name": "timm/whatever"}})) == "timm/whatever"


def test_a_run_without_norms_says_how_to_get_them(tmp_path):
    text = write_report(write_run(tmp_path / "plain")).read_text()
    assert "--probe-interval 100" in text
    assert "img-src" not in text


def test_files_of_the_wrong_kind_are_left_out(folder):
    (folder / "config.toml").write_text(to_toml({"classes": ["a"], "model": {"name": "x"}}))
    (folder / "environment.json").write_text('{"starts": "x", "gpu": [1], "gpu_memory": "y", "threads": {}}')
    for name in ("evaluation.json", "examples.json"):
        (folder / name).write_text('{"confusion": 3, "examples": {"a": 1}}')
    (folder / "guard.jsonl").write_text('{"epoch": [], "update": "x", "cause": 4, "kind": null}\n')
    assert "This page loads nothing" in write_report(folder).read_text()


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ([40, 60, 70, 75, 78, 80, 82, 84], "was still rising, by 4.0 points: train longer."),
        ([40, 60, 70, 80, 80, 80, 80, 80], "has levelled off."),
        ([40, 60, 85, 80, 80, 80, 80, 80], "was best after epoch 3, 5.0 points above the last"),
        ([40, 60], "are classified correctly by the last weights."),
    ],
)
def test_a_run_says_first_what_it_reached_and_whether_it_had_converged(curve, said):
    rows = [{"split": "val", "epoch": epoch, "top1": top1} for epoch, top1 in enumerate(curve, 1)]
    summary = {"status": "done", "last": {"top1": curve[-1], "images": 1200}}
    run = RunRecord("run", summary=summary, metrics=rows, folder=Path("my runs/a"))
    assert answer(run).startswith(f"{curve[-1]:.2f} % of 1,200 val images are classified correctly")
    assert said in answer(run)
    tested = RunRecord("run", summary={**summary, "test": {"top1": 71.5, "images": 300}}, metrics=rows)
    assert answer(tested).startswith("71.50 % of 300 test images")
    assert [line for _, line in next_commands(run)] == [
        "fathoms predict IMAGES --checkpoint 'my runs/a'",
        "fathoms export 'my runs/a'",
    ]


@pytest.mark.parametrize("summary", [{}, {"status": "diverged", "last": {"top1": 10.0}}, {"status": "done"}])
def test_a_run_without_an_end_answers_nothing(summary):
    assert answer(RunRecord("run", summary=summary)) == ""
