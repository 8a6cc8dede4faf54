"""Verdicts on planted cases, and the rates at which they are wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from statsmodels.stats.weightstats import ttost_ind

from fathoms.comparing.answer import answer
from fathoms.comparing.arms import Arm, Metric
from fathoms.comparing.looks import detectable
from fathoms.comparing.results import judged
from fathoms.comparing.statistics import wilson
from fathoms.comparing.verdicts import Rules, judge

TOP1 = Metric("top1", "points", 1, 10.0)
LOSS = Metric("loss", "", -1, 2.3026)


def _benchmark(name):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    )
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulation, shares = _benchmark("compare_batches"), _benchmark("compare_shares")


def arm(name, *scores, **counts):
    """An arm whose runs that ended without a score have the seeds after those that have one."""
    after = len(scores)
    lost = {kind: tuple(range(after, after + n)) if isinstance(n, int) else n for kind, n in counts.items()}
    return Arm(name, tuple(enumerate(scores)), **lost)


def only(arms, **rules):
    (verdict,) = judge(arms, Rules(**{"metric": TOP1, "margin": 0.8, **rules}))
    return verdict


def test_a_clear_difference_names_the_better_arm():
    verdict = only([arm("dyt", 88.0, 88.2, 88.1), arm("layernorm", 90.0, 90.1, 90.2)])
    assert verdict.verdict == "b better"
    assert verdict.sentence.startswith("layernorm is better than dyt by 2.00 points")
    assert verdict.high < 0


def test_less_loss_is_better():
    verdict = only([arm("a", 0.40, 0.41, 0.42), arm("b", 0.60, 0.61, 0.62)], metric=LOSS, margin=0.05)
    assert verdict.verdict == "a better"
    losses = [arm("a", 0.40, 0.41, 0.42, 0.43, 0.62), arm("b", 0.60, 0.61, 0.62, 0.63, 0.64)]
    # Of 25 pairs of runs a has less loss in 22, and as much in one.
    assert only(losses, metric=LOSS, margin=0.05).win_share == pytest.approx(22.5 / 25)


def test_equal_arms_are_equivalent_within_the_margin():
    verdict = only([arm("a", 90.0, 90.1, 90.2, 90.1, 90.0), arm("b", 90.1, 90.0, 90.1, 90.2, 90.1)])
    assert verdict.verdict == "no difference"
    assert "no difference above 0.80 points" in verdict.sentence
    assert verdict.win_share == pytest.approx(0.42)


def test_noisy_arms_are_not_separated_and_the_seeds_that_would_do_it_are_said():
    arms = [arm("a", 88.0, 91.0, 90.0, 89.0, 90.5), arm("b", 89.5, 88.2, 91.2, 90.4, 90.0)]
    verdict = only(arms, margin=0.5)
    assert verdict.verdict == "undecided"
    # From the deviation pooled over both arms, 1.16 points.
    assert "undecided; 47 to 197 more seeds would show 0.50 points" in verdict.sentence


def test_more_seeds_are_not_promised_to_show_what_tuning_leaves_open():
    noisy = {"a": [50.0, 53.0, 51.0, 54.0, 50.5], "b": [51.0, 54.0, 50.0, 53.5, 52.0]}

    def told(variance, margin=2.0):
        arms = [
            Arm(name, tuple(enumerate(scores)), settings={"arm": name}, tuning=variance)
            for name, scores in noisy.items()
        ]
        return judge(arms, Rules(Metric("top1", "points", 1, 10.0), margin))[0]

    plain, tuned, lucky = told(0.0), told(0.1), told(1.0)
    assert [verdict.verdict for verdict in (plain, tuned, lucky)] == ["undecided"] * 3
    assert plain.more < tuned.more
    assert f"to {plain.more} more seeds would show 2.00 points" in plain.sentence
    # At 80 % a difference has to be 2.8 deviations, and two arms of variance 1 leave 1.4 open for ever.
    assert lucky.more is None
    assert "no number of seeds would show 2.00 points" in lucky.sentence
    assert told(0.5, margin=2.79).more is None
    assert told(0.5, margin=2.95).more is not None or "over 1,000" in told(0.5, margin=2.95).sentence


def test_two_seeds_give_no_verdict():
    verdict = only([arm("a", 80.0, 80.1), arm("b", 90.0, 90.1)])
    assert verdict.verdict == "too few seeds"
    assert verdict.to_json()["low"] is None


def test_a_winner_with_diverged_runs_is_said_to_have_them():
    arms = [arm("a", 95.0, 95.1, 95.2, diverged=2), arm("b", 90.0, 90.1, 90.2, 90.1, 90.0)]
    verdict = only(arms)
    assert verdict.verdict == "a better"
    assert "but 2 of its 5 runs diverged" in verdict.sentence
    assert "a 2 of 5, b 0 of 5 (not told apart" in verdict.sentence
    assert arms[0].mean_with_diverged(10.0) == pytest.approx((95.0 + 95.1 + 95.2 + 20) / 5)


def test_the_leader_counts_diverged_runs_at_chance():
    arms = [arm("risky", 95.0, 95.1, 95.2, diverged=2), arm("safe", 90.0, 90.1, 90.2, 90.1, 90.0)]
    said = answer(arms, judge(arms, Rules(TOP1, 0.8)), Rules(TOP1, 0.8))
    assert said.startswith(
        "no winner: safe and risky are not told apart; safe has the highest mean top1 90.08"
    )
    assert "among the other runs behind risky" in said
    assert "better than" not in said
    assert "wins" not in said


def test_a_run_that_diverged_has_no_better_loss_than_one_that_overfitted():
    plan = {"metric": "loss", "classes": 10, "margin": 0.01, "floor": 0.0, "baseline": None, "paired": False}
    losses = {"stable": (2.55, 2.56, 2.54, 2.55, 2.56), "risky": (2.60, 2.61, 2.60, None, None)}
    rows = [
        {"arm": {}, "name": name, "seed": seed, "loss": loss, "run": None}
        | {"status": "diverged" if loss is None else "done"}
        for name, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    results = judged(rows, plan)
    assert results["answer"].startswith(
        "stable wins, mean loss 2.5520 (2.5389 to 2.5651) over 5 seeds; better than risky"
    )
    assert results["arms"][1]["mean_with_diverged"] == pytest.approx((2.60 + 3 * 2.61 + 2.60) / 5)


def test_the_family_is_the_plans_pairs_also_while_runs_are_left():
    done = [arm("a", 90.0, 90.2, 90.1), arm("b", 89.0, 89.2, 89.3)]
    rules = Rules(TOP1, 0.8, baseline="b")
    (alone,) = judge(done, rules)
    planned = judge([*done, *(arm(name, 90.0) for name in "cdef")], rules)[0]
    assert planned.p == pytest.approx(5 * alone.p)
    assert planned.high - planned.low > 1.5 * (alone.high - alone.low)


def test_an_arm_whose_runs_all_diverged_is_said_to_have_diverged():
    arms = [arm("ok", 90.0, 90.1, 90.2), arm("bad|x", diverged=3)]
    verdict = only(arms)
    assert verdict.sentence == "ok and bad|x: no verdict on the score, since bad|x diverged in 3 of 3"
    said = answer(arms, [verdict], Rules(TOP1, 0.8))
    assert said.endswith("bad|x diverged in 3 of 3")
    assert (
        answer([arms[1]], [], Rules(TOP1, 0.8)) == "no run has ended with a score; bad|x diverged in 3 of 3"
    )
    five = only([arm("ok", 90.0, 90.1, 90.2, 90.1, 90.0), arm("bad", diverged=5)])
    assert (
        "bad diverged in 5 of 5; bad diverges more often (diverged: ok 0 of 5, bad 5 of 5; p = 0.0079"
        in five.sentence
    )
    assert five.verdict == "b diverges more often"
    # Of five arms that diverged none is named with its counts.
    many = [arms[0], *(arm(f"bad{k}", diverged=2) for k in range(5))]
    assert "bad0, bad1, bad2 and 2 others diverged in all of their runs" in answer(many, [], Rules(TOP1, 0.8))


def test_three_equal_scores_have_the_spread_that_the_images_alone_bring():
    """At 34 % of 500 images three seeds that agree are luck: the old interval was +- 0.14 points."""
    few = Metric("top1", "points", 1, 10.0, 500)
    verdict = only([arm("a", 34.0, 34.0, 34.0), arm("b", 32.0, 32.0, 32.0)], metric=few)
    assert verdict.verdict == "undecided"
    assert verdict.high - verdict.low > 8
    many = [arm("a", 84.0, 84.0, 84.0), arm("b", 32.0, 32.0, 32.0)]
    assert only(many, metric=few).verdict == "a better"
    assert "top1 34.00 (28" in answer([arm("a", 34.0, 34.0, 34.0)], [], Rules(few, 0.8))


@pytest.mark.parametrize("pairs", [False, True])
def test_losses_without_spread_over_seeds_give_no_verdict(pairs):
    arms = [arm("a", 0.4, 0.4, 0.4), arm("b", 0.1, 0.1, 0.1)]
    verdict = only(arms, metric=LOSS, margin=0.05, paired=pairs)
    assert (verdict.verdict, verdict.to_json()["p"]) == ("no spread", None)
    assert verdict.sentence == "a and b: no verdict, since there is no spread over 3 seeds"
    assert "; no spread over seeds against a" in answer(arms, [verdict], Rules(LOSS, 0.05))


def test_divergence_is_corrected_over_all_pairs():
    clean = [arm(f"ok{k}", 90.0, 90.1, 90.2, 90.1, 90.0) for k in range(2)]
    bad = arm("bad", 90.0, diverged=4)
    (alone,) = judge([clean[0], bad], Rules(TOP1, 0.8))
    assert (
        "bad diverges more often (diverged: ok0 0 of 5, bad 4 of 5; p = 0.048, Fisher, Holm)"
        in alone.sentence
    )
    said = [verdict.sentence for verdict in judge([*clean, bad], Rules(TOP1, 0.8))]
    assert sum("(not told apart, p = 0.14, Fisher, Holm)" in sentence for sentence in said) == 2


def test_a_single_finished_seed_is_counted_in_the_singular():
    assert "no verdict from 1 finished seed; 3 are" in only([arm("a", 80.0), arm("b", 90.0)]).sentence


def test_the_answer_says_how_many_runs_stalled_at_guessing():
    arms = [arm("a", 10.0, 10.1, 10.2, stalled=3), arm("b", 10.1, 9.9, 10.0, stalled=3)]
    said = answer(arms, judge(arms, Rules(TOP1, 3.0)), Rules(TOP1, 0.8))
    assert said.startswith(
        "all 6 runs stalled at guessing, so nothing was learned to compare; no winner: a and b are not told apart"
    )
    arms = [arm("a", 80.0, 80.1, 80.2), arm("b", 80.1, 79.9, 10.0, stalled=1)]
    assert answer(arms, [], Rules(TOP1, 0.8)).count("; 1 of 6 runs stalled at guessing") == 1
    assert answer([arm("a", 10.0, stalled=1)], [], Rules(TOP1, 0.8)).startswith(
        "the only run stalled at guessing"
    )


def test_one_arm_alone_leads_nothing():
    said = answer([arm("a", 90.0, 90.1, 90.2, diverged=1)], [], Rules(TOP1, 0.8))
    assert said.startswith("a has mean top1 90.10 (89.85 to 90.35) over 3 seeds; 1 of its 4 runs diverged;")
    assert said.endswith("there is no other arm to compare it with")


def test_new_images_widen_the_interval_and_need_the_bits_of_every_run():
    rng = np.random.default_rng(0)
    bits = [(rng.uniform(0, 1, (5, 1000)) < chance).astype(np.uint8) for chance in (0.9, 0.8)]
    arms = [
        Arm(name, tuple(enumerate((100 * own.mean(1)).tolist())), correct=own)
        for name, own in zip("ab", bits, strict=True)
    ]
    verdict = only(arms)
    assert (verdict.verdict, verdict.new_images) == ("a better", True)
    blind = only([dataclasses.replace(own, correct=None) for own in arms])
    assert 0 < verdict.low < blind.low < blind.high < verdict.high < 20
    assert not only([arms[0], arm("b", 79.0, 80.0, 81.0)]).new_images
    assert not only(arms, metric=LOSS).new_images


def test_arms_of_the_same_weights_are_paired_by_seed():
    before = [80.0, 85.0, 90.0, 82.0, 88.0]
    arms = [arm("folded", *(x + 0.3 + 0.01 * k for k, x in enumerate(before))), arm("plain", *before)]
    assert only(arms, margin=0.1).verdict == "undecided"
    verdict = only(arms, margin=0.1, paired=True)
    assert (verdict.verdict, verdict.test) == ("a better", "paired t, Holm")
    assert verdict.correlation > 0.99
    assert "paired by seed, correlation 1.00" in verdict.sentence
    # Seed 1 of a and seed 5 of b have no partner: what they scored is in no number.
    a = Arm("a", ((0, 90.0), (1, 10.0), (2, 85.0), (3, 88.0), (4, 80.0), (6, 87.0)))
    b = Arm("b", ((0, 89.0), (2, 86.0), (3, 87.0), (4, 79.0), (5, 99.0), (6, 86.0)))
    verdict = only([a, b], margin=0.1, paired=True)
    assert (verdict.n, verdict.difference, verdict.win_share) == (5, pytest.approx(0.6), 0.8)
    few = [Arm("a", ((0, 90.0), (1, 10.0), (2, 85.0))), Arm("b", ((0, 89.0), (2, 86.0), (3, 99.0)))]
    verdict = only(few, paired=True)
    assert (verdict.n, verdict.difference, verdict.verdict) == (2, 0.0, "too few seeds")
    assert only([Arm("a", ((0, 90.0),)), Arm("b", ((1, 80.0),))], paired=True).to_json()["difference"] is None


def test_arms_that_are_not_paired_have_no_correlation():
    a, b = arm("a", 90.0, 85.0, 88.0), Arm("b", ((0, 89.0), (2, 84.0), (3, 87.0)))
    verdict = only([a, b])
    assert verdict.to_json()["correlation"] is None
    assert verdict.difference == pytest.approx(1.0)


def test_a_baseline_leaves_the_other_pairs_out():
    arms = [arm(name, 90.0, 90.1, 90.3) for name in "abc"]
    verdicts = judge(arms, Rules(TOP1, 0.8, baseline="a"))
    assert [(v.a, v.b) for v in verdicts] == [("b", "a"), ("c", "a")]
    axes = [("dyt", "12"), ("rmsnorm", "12"), ("dyt", "24"), ("rmsnorm", "24")]
    arms = [arm(f"norm={n}, depth={d}", 90.0, 90.1, 90.3, settings={"norm": n, "depth": d}) for n, d in axes]
    verdicts = judge(arms, Rules(TOP1, 0.8, baseline="norm=rmsnorm"))
    assert [(v.a, v.b) for v in verdicts] == [
        (f"norm=dyt, depth={d}", f"norm=rmsnorm, depth={d}") for d in ("12", "24")
    ]


@pytest.mark.parametrize(
    "design",
    [
        simulation.Design((3,)),
        simulation.Design((5,), 7, (3.0, *[1.0] * 7)),
        simulation.Design((3, 5, 10), 3),
        simulation.Design((10,), fewer=3),
        simulation.Design((6,), 4, keep=(2, 3)),
        simulation.Design((5,), 1, (0.6, 0.6), curve="parabola"),
        simulation.Design((10,), 1, (0.6, 0.6), curve="grows until it diverges"),
        simulation.Design((3, 5, 10), 5, (0.6,) * 6, keep=(2, 3), curve="parabola", diverging=0.2),
    ],
)
def test_equal_arms_are_rarely_called_different(design):
    # Of 400 comparisons; a true rate of 5 % gives more than 7.75 % less than once in a hundred such tests.
    row = simulation.simulate(design, 400, np.random.default_rng(0))
    assert row["error"] <= 0.0775
    assert row["coverage"] >= 0.9225


@pytest.mark.parametrize(
    ("design", "least"),
    [
        (simulation.Design((3, 5, 10), grown=True), 0.06),
        (simulation.Design((10,), 1, (0.6, 0.6), curve="parabola", rule=simulation.BEST_OF), 0.15),
    ],
)
def test_the_simulation_sees_what_breaks_the_promise(design, least):
    """Looks without a plan, and a rate that is the best of single trials: ten and twenty-eight in a hundred."""
    assert simulation.simulate(design, 400, np.random.default_rng(0))["error"] > least


def test_a_planted_difference_is_found_as_often_as_theory_says():
    design = simulation.Design((5,), gain=detectable(1.0, 5))
    assert simulation.simulate(design, 2000, np.random.default_rng(0))["power"] == pytest.approx(
        0.8, abs=0.03
    )


def test_looks_and_dropped_arms_save_runs_and_keep_the_power():
    fixed = simulation.Design((10,), 5, gain=3.0)
    rows = {}
    for key, more in {"fixed": {}, "looks": {"seeds": (3, 5, 10)}, "keep": {"keep": (2, 3)}}.items():
        rows[key] = simulation.simulate(dataclasses.replace(fixed, **more), 200, np.random.default_rng(0))
    assert rows["keep"]["runs_of_fixed"] == pytest.approx(0.65)
    assert rows["looks"]["runs_of_fixed"] < 1
    assert min(row["power"] for row in rows.values()) > rows["fixed"]["power"] - 0.03


def test_arms_at_the_margin_are_rarely_called_equal():
    assert shares.called_equivalent(1000, 2.0, np.random.default_rng(0)) <= 0.07


def test_equivalence_is_tested_at_5_percent_over_the_number_of_pairs():
    """A margin that statsmodels' two one-sided tests meet at 5 % and at 5 % over two pairs, but not over three."""
    scores = {"a": (90.0, 90.3, 90.1, 89.8, 90.2), "b": (90.1, 90.2, 90.3, 89.9, 90.0)}
    ours = [arm(name, *own) for name, own in scores.items()]
    most = {0.24: 1, 0.30: 2, 0.32: 3}
    ps = {m: ttost_ind(*scores.values(), -m, m, usevar="unequal")[0] for m in most}
    assert all(0.05 / (pairs + 1) < ps[m] < 0.05 / pairs for m, pairs in most.items())
    far = [arm(f"c{k}", *(10.0 + 10 * k + x for x in (0.0, 0.1, 0.2))) for k in range(2)]
    for margin in most:
        for pairs in (1, 2, 3):
            others = far[: pairs - 1]
            rules = Rules(TOP1, margin, baseline="b")
            verdict = judge([ours[0], ours[1], *others], rules)[0]
            said = "no difference above" in verdict.sentence
            assert said == (pairs <= most[margin]), (margin, pairs)


def test_a_failed_run_has_not_ended():
    crashed = Arm("a", ((0, 90.0),), diverged=(1,), failed=(2, 3, 4))
    assert (crashed.ended, crashed.lost) == (2, False)
    assert crashed.divergence() == wilson(1, 2)
    assert crashed.mean_with_diverged(10.0) == 50.0
    assert not Arm("a", (), failed=(0, 1)).lost
    assert Arm("a", (), diverged=(0,)).lost
