"""Planned looks, dropped arms, seeds after the answer, and a rate that diverges: what is asked for and what is said."""

import numpy as np
import pytest
from scipy import stats

from fathoms.comparing.arms import Arm, Metric
from fathoms.comparing.looks import nominal_levels, power_of
from fathoms.comparing.plan import parse_keep, parse_seeds
from fathoms.comparing.results import judged
from fathoms.comparing.statistics import welch
from fathoms.comparing.tuning import Tuning
from fathoms.comparing.verdicts import DROPPED, Rules, dropped, judge, wanted_seeds
from fathoms.errors import ConfigError

TOP1 = Metric("top1", "points", 1, 10.0)


def arm(name, mean, seeds=10, sd=1.0):
    scores = mean + sd * np.random.default_rng(len(name)).normal(size=seeds)
    return Arm(name, tuple(enumerate(scores.tolist())), settings={"arm": name})


def test_the_levels_of_looks_are_those_of_the_tables_and_simulate_to_the_whole():
    # Lan and DeMets' O'Brien-Fleming limits at half and at all of the seeds: 2.963 and 1.969.
    assert nominal_levels((5, 10), 0.05) == pytest.approx((0.00305, 0.0490), abs=5e-5)
    # Their spending function at three tenths, by hand.
    spent = 4 * stats.norm.sf(stats.norm.isf(0.05 / 4) / 0.3**0.5)
    assert nominal_levels((3, 5, 10), 0.05)[0] == pytest.approx(spent)
    levels = nominal_levels((3, 5, 10), 0.01)
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(400_000, 10)).cumsum(1)
    crossed = np.zeros(len(steps), bool)
    for seeds, level in zip((3, 5, 10), levels, strict=True):
        crossed |= np.abs(steps[:, seeds - 1]) / seeds**0.5 > stats.norm.isf(level / 2)
    assert crossed.mean() == pytest.approx(0.01, abs=5e-4)


def test_arms_of_decided_pairs_get_no_further_seeds():
    arms = [arm("base", 50.0), arm("far", 90.0), arm("near", 50.3)]
    rules = Rules(TOP1, 0.1, "base", looks=(5, 10))
    begun = [own.until(4) for own in arms]
    assert set(wanted_seeds(begun, rules, 10).values()) == {5}
    assert wanted_seeds([own.until(5) for own in arms], rules, 10) == {"base": 10, "far": 5, "near": 10}
    verdicts = {v.a: v for v in judge(arms, rules)}
    # What a look has decided stays, whatever later seeds say; what it has not is judged at the next.
    assert (verdicts["far"].n, verdicts["near"].n) == (5, 10)
    assert "look at 5 seeds" in verdicts["far"].test


def test_dropped_arms_have_no_verdict_and_still_count_in_the_family():
    arms = [arm("base", 50.0), arm("good", 55.0), arm("bad", 45.0), arm("worse", 40.0)]
    rules = Rules(TOP1, 0.1, "base", keep=(1, 3))
    assert dropped([own.until(2) for own in arms], rules) == set()
    assert dropped(arms, rules) == {"bad", "worse"}
    assert wanted_seeds(arms, rules, 10) == {"base": 10, "good": 10, "bad": 3, "worse": 3}
    verdicts = {v.a: v for v in judge(arms, rules)}
    assert [verdicts[name].verdict for name in ("bad", "worse")] == [DROPPED] * 2
    assert verdicts["good"].level == pytest.approx(0.05 / 3)


def test_seeds_that_follow_the_answer_are_said_to_be_exploratory(comparisons):
    words = ("--axis", "norm=layernorm,dyt", "--seeds")
    comparison = comparisons.make(*words, "3")
    folder = comparison.folder
    folder.cells.mkdir(parents=True)
    assert folder.begin(comparison.plan())["exploratory"] is False
    # Nothing has ended: another number of seeds is another plan.
    assert folder.begin(comparisons.make(*words, "4").plan())["exploratory"] is False
    run = comparison.cells()[0].folder
    run.mkdir()
    (run / "summary.json").write_text('{"status": "diverged"}')
    assert folder.begin(comparisons.make(*words, "4").plan())["exploratory"] is False
    plan = folder.begin(comparisons.make(*words, "5").plan())
    assert plan["exploratory"] is True
    rows = [
        {
            "arm": {},
            "name": name,
            "seed": seed,
            "top1": 50.0 + seed,
            "loss": 1.0,
            "run": None,
            "status": "done",
        }
        for name in ("a", "b")
        for seed in range(5)
    ]
    results = judged(rows, {**plan, "baseline": None})
    assert "seeds were added after the answer" in results["answer"]
    assert results["exploratory"]
    assert all(row["sentence"].startswith("exploratory: ") for row in results["verdicts"])


def test_a_rate_at_which_a_run_diverged_gives_way_to_the_next_lower_that_trained():
    tuning = Tuning({"lr": ["1e-3", "2e-3", "4e-3"]}, None, lambda *_: None)
    scores = {"1e-3": 60.0, "2e-3": 70.0, "4e-3": 72.0}
    trials = [{"choice": {"lr": lr}, "status": "done", "top1": s, "loss": 1.0} for lr, s in scores.items()]
    found = {"best": {"lr": "0.0033"}, "replaced": [], "trials": trials}
    assert tuning.lowered(found) == {"lr": "0.002"}
    assert tuning.lowered({**found, "best": {"lr": "0.001"}}) is None
    assert tuning.lowered({**found, "replaced": [{}, {}]}) is None


@pytest.mark.parametrize("text", ["0", "5,3", "3,3", "2,5", "a", "3,"])
def test_seeds_that_are_no_looks_are_refused(text):
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["3", "3@10", "0@3", "a@3"])
def test_arms_to_keep_that_say_nothing_are_refused(text):
    with pytest.raises(ConfigError, match="--keep-arms"):
        parse_keep(text, (10,))


def test_the_power_of_a_test_is_how_often_it_finds_the_difference():
    a, b = np.random.default_rng(0).normal(size=(2, 4000, 3)) + np.array([0.0, 3.0])[:, None, None]
    found = np.mean([welch(x, y).p < 0.05 for x, y in zip(a, b, strict=True)])
    assert power_of(3.0, 1.0, 3) == pytest.approx(found, abs=0.025)
    assert power_of(1e-9, 1.0, 5, pairs=True) == pytest.approx(0.05)


def test_paired_scores_that_differ_alike_differ_by_what_an_image_is_at_least():
    base = Arm("base", ((0, 50.0), (1, 60.0), (2, 55.0)))
    other = Arm("other", ((0, 50.5), (1, 60.5), (2, 55.5)))
    metric = Metric("top1", "points", 1, 10.0, images=200)
    (verdict,) = judge([base, other], Rules(metric, 0.1, "base", paired=True))
    # Scores are multiples of half a point: rounding alone has a variance of a sixth of its square, over three seeds.
    error = ((100 / 200) ** 2 / 6 / 3) ** 0.5
    assert verdict.high - verdict.difference == pytest.approx(stats.t.isf(0.025, 2) * error, rel=1e-3)
