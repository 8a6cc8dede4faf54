"""Seconds to an accuracy as the measure that decides: how they are read off a run, and runs that never get there."""

import json

import pytest

from fathoms.comparing.plan import target_of
from fathoms.comparing.results import as_csv, as_table, judged, row_of, seconds_to

PLAN = {"metric": "seconds-to=90", "classes": 10, "images": 360, "largest_class": 0.1, "margin": 2.0}
PLAN |= {"baseline": None, "paired": False, "split": "test"}


def run_folder(path, accuracies, rates=(100.0, 50.0, 100.0)):
    """A run of epochs of ten updates, with its images per second and its accuracies on val."""
    path.mkdir()
    lines = []
    for epoch, (rate, top1) in enumerate(zip(rates, accuracies, strict=True), 1):
        lines.append({"epoch": epoch, "step": 10 * epoch, "split": "train", "images_per_second": rate})
        lines.append({"epoch": epoch, "step": 10 * epoch, "split": "val", "top1": top1})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(times):
    """The rows of arms by their seconds; None did not get there in 60 seconds."""
    return [
        {"arm": {"norm": name}, "name": name, "seed": seed, "status": "done", "split": "test", "top1": 95.0}
        | {"loss": 0.2, "reason": None, "run": None, "seconds": 60.0, "seconds-to=90": value}
        for name, own in times.items()
        for seed, value in enumerate(own)
    ]


def test_the_seconds_are_those_of_the_epochs_until_val_was_first_there(tmp_path):
    # The second epoch ran at half the speed: it took half of the time.
    run = run_folder(tmp_path / "a", (50.0, 91.0, 80.0))
    assert seconds_to(run, 90.0, {"seconds": 40.0}) == pytest.approx(30.0)
    assert seconds_to(run, 40.0, {"seconds": 40.0}) == pytest.approx(10.0)
    assert seconds_to(run, 92.0, {"seconds": 40.0}) is None
    assert seconds_to(tmp_path, 90.0, {"seconds": 40.0}) is None


def test_only_a_metric_of_time_has_a_target():
    assert [target_of(metric) for metric in ("top1", "loss", "seconds-to=87.5")] == [None, None, 87.5]


@pytest.mark.plain
def test_a_row_has_its_seconds_and_keeps_its_status_where_it_never_got_there(tmp_path):
    class Folder:
        path = tmp_path

    class Cell:
        settings, arm, seed, folder = {}, "a", 0, run_folder(tmp_path / "a", (50.0, 60.0, 70.0))

    measured = {"top1": 70.0, "loss": 1.0}
    row = row_of(Cell, {"status": "done", "test": measured, "seconds": 40.0}, Folder, PLAN)
    assert (row["status"], row["seconds-to=90"], row["seconds"]) == ("done", None, 40.0)


def test_less_time_is_better_and_runs_that_never_got_there_are_counted():
    times = {"fast": [20.0, 21.0, 19.0, 20.5, 20.2], "slow": [40.0, 41.0, 39.0, 40.5, None]}
    results = judged(rows_of(times), PLAN)
    (verdict,) = results["verdicts"]
    assert verdict["sentence"].startswith("fast is better than slow by 20.0 s")
    assert "did not reach 90 %: fast 0 of 5, slow 1 of 5 (not told apart" in verdict["sentence"]
    assert results["answer"].startswith("fast wins, mean seconds-to=90 20.1")
    slow = results["arms"][1]
    # A run that never got there took at least as long as the longest.
    assert (slow["diverged"], slow["mean_with_diverged"]) == (
        1,
        pytest.approx((40 + 41 + 39 + 40.5 + 60) / 5),
    )
    assert "below 90 %" in as_table(results)
    assert as_csv(results).splitlines()[0] == "arm,norm,seed,status,split,top1,loss,seconds-to=90,run"


def test_an_arm_that_misses_the_target_more_often_is_said_to():
    times = {"sure": [30.0, 31.0, 29.0, 30.5, 30.2], "never": [None] * 5}
    results = judged(rows_of(times), PLAN)
    (verdict,) = results["verdicts"]
    assert verdict["verdict"] == "b diverges more often"
    assert "never misses 90 % more often" in verdict["sentence"]
    assert "never did not reach 90 % in 5 of 5" in results["answer"]
