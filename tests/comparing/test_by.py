"""An answer by a time: the plan that fits, what becomes of it, and what is refused."""

import dataclasses
import datetime
import json

import pytest

from fathoms.cli.main import main
from fathoms.comparing import by
from fathoms.comparing.by import Task, Times, choose, design_of, until
from fathoms.comparing.dry_run import makespan
from fathoms.comparing.looks import seeds_for, smallest_shown
from fathoms.errors import ConfigError

NORMS = ("--axis", "norm=layernorm,dyt")


def task(arms=2, values=0, fixed=0, margin=2.0, seconds=10.0):
    """Runs of so many seconds on one worker, and no time in between."""
    pairs = arms - 1 if fixed else arms * (arms - 1) // 2
    return Task([Times(0.0, 1.0, seconds, seconds)] * arms, values, 1, 0.0, fixed, pairs, margin)


def test_as_many_seeds_run_as_fit_and_none_that_do_not():
    assert choose(task(), 59.0) is None, "three seeds of two arms are six runs of ten seconds"
    assert choose(task(), 60.0).seeds == 3
    for seconds in (79.0, 80.0, 100.0, 205.0):
        design = choose(task(margin=0.5), seconds)
        assert design.seconds <= seconds < design_of(task(margin=0.5), design.seeds + 1, None).seconds


def test_trials_come_before_seeds_with_one_beyond_the_edge_of_the_grid():
    # Two arms of three values and one more: eight trials of ten seconds.
    assert choose(task(values=3), 139.0) is None
    assert choose(task(values=3), 140.0).seeds == 3


def test_no_more_seeds_run_than_show_what_matters():
    enough = choose(task(), 1e9).seeds
    # A margin of two floors is one deviation where seeds spread by two.
    assert enough == seeds_for(1.0, 1.0, 0.05)


def test_the_best_half_goes_on_where_that_shows_a_smaller_difference_and_all_where_they_show_what_matters():
    six = task(arms=6)
    short, long = choose(six, 6 * 60.0), choose(six, 1e9)
    assert (short.keep, long.keep) == ((3, 3), None)
    fewer = max(n for n in range(3, 20) if design_of(six, n, None).seconds <= 6 * 60.0)
    assert smallest_shown(1.0, short.looks, 15) < smallest_shown(1.0, (fewer // 2, fewer), 15)
    assert short.seconds <= 6 * 60.0
    # The baseline goes on beside them, whatever it scores.
    with_baseline = choose(task(arms=5, fixed=1), 5 * 60.0)
    assert with_baseline.keep == (2, 3)
    assert with_baseline.seconds == (5 * 3 + 3 * (with_baseline.seeds - 3)) * 10.0


def test_half_of_the_seeds_are_a_look_from_six_on():
    assert [design_of(task(), seeds, None).looks for seeds in (5, 6, 9)] == [(), (3, 6), (4, 9)]


def test_runs_go_to_the_first_worker_that_is_free():
    assert makespan([1.0] * 5, 2) == 3.0
    assert makespan([4.0, 1.0, 1.0], 2) == 4.0


def test_a_time_of_day_is_the_next_one():
    noon = datetime.datetime(2026, 3, 1, 12, 0)
    assert [until(text, noon) for text in ("12:30", "11:00", "8h", "25:00")] == [
        1800.0,
        23 * 3600.0,
        None,
        None,
    ]


def test_a_comparison_is_planned_for_its_time_and_the_same_command_goes_on_with_the_plan(
    comparisons, capsys, monkeypatch
):
    monkeypatch.setattr(by, "MOST", 3)
    words = (*NORMS, "--tune", "lr=3e-3,6e-3,12e-3", "--by", "15m")
    assert comparisons.run(*words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "by a pilot: --seeds 3" in said
    assert "smallest difference these seeds show" in said
    assert "by the time that trials took: 3 seeds; this stays" in said
    plan = comparisons.read("plan.json")
    assert (plan["seeds"], plan["looks"], plan["keep_arms"], plan["exploratory"]) == (3, [], None, False)
    assert 0 < plan["by"]["planned"] <= 15 * 60 * 0.9
    monkeypatch.setattr(by, "MOST", 9)
    assert comparisons.run(*words) == 0
    again = comparisons.read("plan.json")
    assert (again["seeds"], again["exploratory"]) == (3, False), "scores are known, so nothing changes"


def test_the_time_of_the_trials_changes_the_seeds_until_a_score_is_known(comparisons):
    tuned = comparisons.make(*NORMS, "--tune", "lr=1e-3,2e-3,4e-3", "--jobs", "1")
    tuned.options = dataclasses.replace(tuned.options, by={"launch": 0.0})
    rates = {cell.architecture: [1.0, 3.0] for cell in tuned.cells()}
    assert by.refit(tuned, rates, 1e9) is None, "the trials have not ended"
    tuned.tuned = [{"name": name, "best": None, "replaced": []} for name in tuned.arms]
    # Runs of two epochs take four seconds each.
    assert by.refit(tuned, rates, 8 * 8 / 0.9 + 1).seeds == 8
    assert by.refit(tuned, rates, 1.0).seeds == 3, "no fewer, whatever it takes"
    assert by.refit(tuned, {}, 1e9) is None
    done = tuned.cells()[0].folder
    done.mkdir(parents=True)
    (done / "summary.json").write_text("{}")
    assert by.refit(tuned, rates, 1e9) is None


def test_runs_are_shortened_where_three_seeds_do_not_fit_but_not_below_a_quarter(comparisons, monkeypatch):
    def pilot(cells, *_):
        return {cell.architecture: {"start": 0.0, "epoch": 1.0, "launch": 0.0} for cell in cells}

    monkeypatch.setattr(by, "run_pilot", pilot)
    # Two workers or more share six runs; nine tenths of the time count.
    made = comparisons.make(*NORMS, "--jobs", "1", name="draft")
    assert by.flags_for(made, 6 * 2 / 0.9 + 1, fixed_epochs=False)["seeds"] == "3"
    assert by.flags_for(made, 6 * 1 / 0.9 + 1, fixed_epochs=False)["epochs"] == 1
    with pytest.raises(ConfigError, match="3 seeds of 2 arms take about 13 s here"):
        by.flags_for(made, 6 * 1 / 0.9 + 1, fixed_epochs=True)
    with pytest.raises(ConfigError, match="3 seeds of 2 arms take about 7 s here"):
        by.flags_for(made, 5.0, fixed_epochs=False)
    tuned = comparisons.make(*NORMS, "--jobs", "1", "--tune", "lr=1e-3,2e-3,3e-3,4e-3,5e-3", name="tuned")
    chosen = by.flags_for(tuned, (2 * (3 + 1) + 6) * 2 / 0.9 + 1, fixed_epochs=True)
    assert chosen["tune"] == "lr=0.001,0.003,0.005"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--seeds", "5"), "--seeds: --by decides"),
        (("--budget", "5m"), "--budget: --by decides"),
        (("--keep-arms", "2@3"), "--keep-arms: --by decides"),
        (("--by", "soon"), "--by 'soon': write a time"),
    ],
)
def test_what_the_time_decides_is_not_given_beside_it(comparisons, capsys, flags, named):
    assert comparisons.run(*NORMS, "--by", "5m", *flags) == 2
    assert named in capsys.readouterr().err


def test_a_comparison_that_was_planned_without_it_is_not_planned_anew(comparisons, capsys):
    made = comparisons.make(*NORMS)
    made.folder.path.mkdir(parents=True)
    (made.folder.path / "plan.json").write_text(
        json.dumps({**made.plan(), "grown": [], "exploratory": False})
    )
    assert main(["compare", *comparisons.words(*NORMS, "--by", "5m")]) == 2
    assert "was planned without it" in capsys.readouterr().err
