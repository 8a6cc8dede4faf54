"""Verdicts on planted cases, and the rates at which they are wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from fathoms.compare.arms import Arm, Metric
from fathoms.compare.leader import leader
from fathoms.compare.spread import rounding_variance
from fathoms.compare.verdicts import Rules, judge

TOP1 = Metric("top1", "points", 1, 10.0)
LOSS = Metric("loss", "", -1, 2.3026)
_SPEC = importlib.util.spec_from_file_location(
    "compare_statistics", Path(__file__).parents[2] / "benchmarks" / "compare_statistics.py"
)
simulation = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(simulation)


def arm(name, *scores, **counts):
    return Arm(name, tuple(enumerate(scores)), **counts)


def only(arms, **rules):
    (verdict,) = judge(arms, Rules(**{"metric": TOP1, "margin": 0.8, "floor": 0.3, **rules}))
    return verdict


def test_a_clear_difference_names_the_better_arm():
    verdict = only([arm("dyt", 88.0, 88.2, 88.1), arm("layernorm", 90.0, 90.1, 90.2)])
    assert verdict.verdict == "b better"
    assert verdict.sentence.startswith("layernorm is better than dyt by 2.00 points")
    assert verdict.high < 0


def test_less_loss_is_better():
    verdict = only([arm("a", 0.40, 0.41, 0.42), arm("b", 0.60, 0.61, 0.62)], metric=LOSS, margin=0.05)
    assert verdict.verdict == "a better"


def test_equal_arms_are_equivalent_within_the_margin():
    verdict = only([arm("a", 90.0, 90.1, 90.2, 90.1, 90.0), arm("b", 90.1, 90.0, 90.1, 90.2, 90.1)])
    assert verdict.verdict == "equivalent"
    assert "no difference above 0.80 points" in verdict.sentence
    assert verdict.win_share == pytest.approx(0.42)


def test_noisy_arms_are_not_separated_and_the_seeds_that_would_do_it_are_said():
    arms = [arm("a", 88.0, 91.0, 90.0, 89.0, 90.5), arm("b", 89.5, 88.2, 91.2, 90.4, 90.0)]
    verdict = only(arms, margin=0.5)
    assert verdict.verdict == "not separated"
    # From the deviation pooled over both arms, 1.16 points.
    assert "about 86 seeds would show 0.50 points" in verdict.sentence


def test_two_seeds_give_no_verdict():
    verdict = only([arm("a", 80.0, 80.1), arm("b", 90.0, 90.1)])
    assert verdict.verdict == "too few seeds"
    assert verdict.to_json()["low"] is None


def test_a_winner_with_diverged_runs_is_said_to_have_them():
    arms = [arm("a", 95.0, 95.1, 95.2, diverged=2), arm("b", 90.0, 90.1, 90.2, 90.1, 90.0)]
    verdict = only(arms)
    assert verdict.verdict == "a better"
    assert "but 2 of its 5 runs diverged" in verdict.sentence
    assert "a 2 of 5, b 0 of 5 (not separated" in verdict.sentence
    assert arms[0].mean_with_diverged(10.0) == pytest.approx((95.0 + 95.1 + 95.2 + 20) / 5)


def test_the_leader_counts_diverged_runs_at_chance():
    arms = [arm("risky", 95.0, 95.1, 95.2, diverged=2), arm("safe", 90.0, 90.1, 90.2, 90.1, 90.0)]
    said = leader(arms, judge(arms, Rules(TOP1, 0.8, 0.3)), TOP1)
    assert said.startswith("safe leads")


def test_an_arm_whose_runs_all_diverged_is_said_to_have_diverged():
    arms = [arm("ok", 90.0, 90.1, 90.2), arm("bad|x", diverged=3)]
    verdict = only(arms)
    assert verdict.sentence == "ok and bad|x: no verdict on the score, since bad|x diverged in 3 of 3"
    said = leader(arms, [verdict], TOP1)
    assert said.endswith("over 3 seeds; bad|x diverged in 3 of 3")
    assert leader([arms[1]], [], TOP1) == "no run has ended with a score; bad|x diverged in 3 of 3"
    five = only([arm("ok", 90.0, 90.1, 90.2, 90.1, 90.0), arm("bad", diverged=5)])
    assert "bad diverged in 5 of 5; diverged: ok 0 of 5, bad 5 of 5 (differs, p = 0.0079" in five.sentence
    # Of five arms that diverged none is named with its counts.
    many = [arms[0], *(arm(f"bad{k}", diverged=2) for k in range(5))]
    assert "bad0, bad1, bad2 and 2 others diverged in all of their runs" in leader(many, [], TOP1)


def test_equal_scores_over_seeds_have_the_spread_of_their_rounding():
    # 50 images: the accuracies of three seeds are equal, and a step of 2 points apart.
    fifty = Metric("top1", "points", 1, 10.0, rounding_variance(50))
    verdict = only([arm("a", 82.0, 82.0, 82.0), arm("b", 80.0, 80.0, 80.0)], metric=fifty)
    assert verdict.low < 1 < 3 < verdict.high
    assert 0.001 < verdict.p < 0.05
    pair = only([arm("a", 82.0, 82.0, 82.0), arm("b", 80.0, 80.0, 80.0)], metric=fifty, paired=True)
    assert verdict.p < pair.p < 0.1
    assert "a mean top1 of 82.00 (80.57 to 83.43)" in leader([arm("a", 82.0, 82.0, 82.0)], [], fifty)


@pytest.mark.parametrize("pairs", [False, True])
def test_losses_without_spread_over_seeds_give_no_verdict(pairs):
    arms = [arm("a", 0.4, 0.4, 0.4), arm("b", 0.1, 0.1, 0.1)]
    verdict = only(arms, metric=LOSS, margin=0.05, paired=pairs)
    assert (verdict.verdict, verdict.to_json()["p"]) == ("no spread", None)
    assert verdict.sentence == "a and b: no verdict, since there is no spread over 3 seeds"
    assert "; no spread over seeds against a" in leader(arms, [verdict], LOSS)


def test_divergence_is_corrected_over_all_pairs():
    clean = [arm(f"ok{k}", 90.0, 90.1, 90.2, 90.1, 90.0) for k in range(2)]
    bad = arm("bad", 90.0, diverged=4)
    (alone,) = judge([clean[0], bad], Rules(TOP1, 0.8, 0.3))
    assert "(differs, p = 0.048, Fisher, Holm)" in alone.sentence
    said = [verdict.sentence for verdict in judge([*clean, bad], Rules(TOP1, 0.8, 0.3))]
    assert sum("(not separated, p = 0.14, Fisher, Holm)" in sentence for sentence in said) == 2


def test_a_single_finished_seed_is_counted_in_the_singular():
    assert "no verdict from 1 finished seed; 3 are" in only([arm("a", 80.0), arm("b", 90.0)]).sentence


def test_the_answer_says_how_many_runs_stalled_at_guessing():
    arms = [arm("a", 10.0, 10.1, 10.2, stalled=3), arm("b", 10.1, 9.9, 10.0, stalled=3)]
    said = leader(arms, judge(arms, Rules(TOP1, 3.0, 0.3)), TOP1)
    assert said.startswith("all 6 runs stalled at guessing, so nothing was learned to compare; a leads")
    arms = [arm("a", 80.0, 80.1, 80.2), arm("b", 80.1, 79.9, 10.0, stalled=1)]
    assert leader(arms, [], TOP1).endswith("; 1 of 6 runs stalled at guessing")
    assert leader([arm("a", 10.0, stalled=1)], [], TOP1).startswith("the only run stalled at guessing")


def test_one_arm_alone_leads_nothing():
    said = leader([arm("a", 90.0, 90.1, 90.2, diverged=1)], [], TOP1)
    assert said.startswith(
        "a has a mean top1 of 90.10 (89.85 to 90.35) over 3 seeds; 1 of its 4 runs diverged;"
    )
    assert said.endswith("there is no other arm to compare it with")


def test_new_images_widen_the_interval_and_need_the_bits_of_every_run():
    rng = np.random.default_rng(0)
    bits = [(rng.uniform(0, 1, (5, 1000)) < chance).astype(np.uint8) for chance in (0.9, 0.8)]
    arms = [
        Arm(name, tuple(enumerate((100 * own.mean(1)).tolist())), correct=own)
        for name, own in zip("ab", bits, strict=True)
    ]
    verdict = only(arms)
    low, high = verdict.new_images
    assert verdict.verdict == "a better"
    assert 0 < low < 10 < high < 20
    assert verdict.to_json()["new_images"] == [low, high]
    assert only([arms[0], arm("b", 79.0, 80.0, 81.0)]).new_images is None
    assert only(arms, metric=LOSS).new_images is None


def test_arms_of_the_same_weights_are_paired_by_seed():
    before = [80.0, 85.0, 90.0, 82.0, 88.0]
    arms = [arm("folded", *(x + 0.3 + 0.01 * k for k, x in enumerate(before))), arm("plain", *before)]
    assert only(arms, margin=0.1).verdict == "not separated"
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
    verdicts = judge(arms, Rules(TOP1, 0.8, 0.3, baseline="a"))
    assert [(v.a, v.b) for v in verdicts] == [("b", "a"), ("c", "a")]


@pytest.mark.parametrize(("seeds", "ratio"), [(3, 1.0), (5, 3.0), (10, 1.0)])
def test_intervals_cover_the_truth_as_often_as_they_say(seeds, ratio):
    seen = simulation.coverage(3000, seeds, ratio, np.random.default_rng(0))
    assert 0.93 <= seen <= 0.97


@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_equal_arms_are_rarely_called_different(ratio):
    # 400 comparisons of eight arms; a true rate of 5 % gives more than 7.5 % once in a hundred such tests.
    assert simulation.false_positives(400, 8, 5, ratio, np.random.default_rng(0)) <= 0.075


def test_a_planted_difference_is_found_as_often_as_theory_says():
    assert simulation.found(2000, 2.0841, 5, np.random.default_rng(0)) == pytest.approx(0.8, abs=0.03)


def test_arms_at_the_margin_are_rarely_called_equivalent():
    assert simulation.called_equivalent(1000, 2.0, 2.0, 10, np.random.default_rng(0)) <= 0.07
