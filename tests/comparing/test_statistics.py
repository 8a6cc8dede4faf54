"""The statistics of a comparison against other implementations and on planted truths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower

from fathoms.comparing.looks import detectable, holm_at, power_of, seeds_for
from fathoms.comparing.statistics import (
    divergence_p,
    holm,
    image_variance,
    is_stalled,
    least_variances,
    mean_interval,
    noise_floor,
    paired,
    pooled_sd,
    sd_over_seeds,
    welch,
    wilson,
    win_share,
)
from fathoms.errors import ConfigError


@pytest.mark.parametrize("sizes", [(3, 3), (5, 7), (10, 4)])
def test_welch_is_scipys_with_fewer_degrees_of_freedom(sizes):
    rng = np.random.default_rng(sum(sizes))
    a, b = rng.normal(0, 1, sizes[0]), rng.normal(1, 3, sizes[1])
    ours, theirs = welch(a, b), stats.ttest_ind(a, b, equal_var=False)
    assert ours.value / ours.error == pytest.approx(theirs.statistic, rel=1e-12)
    fewest = min(sizes) - 1
    # Of unequal arms the smaller one's; of equal ones half a degree over them is taken off for each.
    expected = fewest + (theirs.df - fewest) * (1 - 0.5 / fewest) if sizes[0] == sizes[1] else fewest
    assert ours.df == pytest.approx(expected)
    assert ours.p == pytest.approx(2 * stats.t.sf(abs(theirs.statistic), expected), rel=1e-9)
    half = ours.error * stats.t.isf(0.005, expected)
    assert ours.interval(0.01) == pytest.approx((ours.value - half, ours.value + half))


def test_no_arm_is_quieter_than_its_images_or_than_most_arms():
    rng = np.random.default_rng(0)
    bits = (rng.uniform(size=(3, 2000)) < rng.uniform(0.2, 1, 2000)).astype(np.uint8)
    scores = {"a": (100 * bits.mean(1)).tolist(), "b": [60.0, 60.0, 60.0], "c": [50.0, 54.0, 58.0]}
    least = least_variances(scores, {"a": bits}, 2000, True)
    assert least["a"] == pytest.approx(1e4 * bits.var(0, ddof=1).mean() / 2000)
    # Without bits that of Jordan (2023) at 40 % error, which is above a third of the median.
    assert least["b"] == pytest.approx(1e4 * 0.2 / 2000)
    assert least_variances({"b": [0.4, 0.4, 0.4], "c": [0.4, 0.5, 0.6]}, {}, 2000, False)[
        "b"
    ] == pytest.approx(np.median([0.0, 0.01]) / 3)


def test_parts_of_an_error_are_added_in_squares_and_never_narrow_it():
    alone, more = (
        welch([1.0, 2.0, 3.0], [4.0, 6.0, 5.0]),
        welch([1.0, 2.0, 3.0], [4.0, 6.0, 5.0], further=0.25),
    )
    assert more.half(0.05) == pytest.approx(math.hypot(alone.half(0.05), 1.959964 * 0.5))
    assert more.p > alone.p
    low, high = more.interval(more.p)
    assert min(abs(low), abs(high)) == pytest.approx(0.0, abs=1e-6)


def test_paired_is_scipys():
    rng = np.random.default_rng(1)
    a = rng.normal(0, 1, 6)
    b = a + rng.normal(0.2, 0.1, 6)
    ours, theirs = paired(a, b), stats.ttest_rel(a, b)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-12)
    assert ours.correlation == pytest.approx(np.corrcoef(a, b)[0, 1])


@pytest.mark.parametrize("count", [1, 2, 7, 28])
def test_holm_is_statsmodels(count):
    ps = (np.random.default_rng(count).uniform(0, 1, count) ** 4).tolist()
    rejected, adjusted, *_ = multipletests(ps, 0.05, "holm")
    assert holm(ps) == pytest.approx(adjusted.tolist())
    assert holm_at(ps, (), 0, len(ps))[1].tolist() == rejected.tolist()


def test_the_corrected_interval_leaves_zero_out_exactly_where_holm_rejects():
    rng = np.random.default_rng(3)
    for _ in range(50):
        differences = [welch(rng.normal(k / 2, 1, 5), rng.normal(0, 1, 5)) for k in range(6)]
        found = holm_at([d.p for d in differences], (), 0, 6)
        for level, rejected, difference in zip(*found, differences, strict=True):
            low, high = difference.interval(level)
            assert (low > 0 or high < 0) == rejected


def test_power_nears_that_of_students_test_and_is_below_it():
    """statsmodels knows the power of Student's test; Welch's has fewer degrees of freedom."""
    for seeds, difference, near in ((3, 3.0, 0.16), (5, 2.0, 0.04), (20, 0.9, 0.002)):
        theirs = TTestIndPower().power(difference, seeds, 0.05)
        assert theirs - near < power_of(difference, 1.0, seeds) < theirs


@pytest.mark.parametrize(("seeds", "difference"), [(3, 2.5), (4, 1.0), (10, 1.3)])
def test_power_is_the_share_of_simulated_tests_that_find_the_difference(seeds, difference):
    rng = np.random.default_rng(seeds)
    a, b = rng.normal(difference, 1, (seeds, 100_000)), rng.normal(0, 1, (seeds, 100_000))
    variances = a.var(0, ddof=1), b.var(0, ddof=1)
    df = (seeds - 1) * sum(variances) ** 2 / (variances[0] ** 2 + variances[1] ** 2)
    df -= 0.5 / (seeds - 1) * (df - (seeds - 1))
    t = (a.mean(0) - b.mean(0)) / np.sqrt(sum(variances) / seeds)
    found = (2 * stats.t.sf(np.abs(t), df) < 0.05).mean()
    assert power_of(difference, 1.0, seeds) == pytest.approx(found, abs=0.006)
    assert power_of(-2 * difference, 2.0, seeds) == pytest.approx(power_of(difference, 1.0, seeds))


def test_spread_and_interval_of_a_mean_are_scipys():
    scores = (90.0, 91.0, 89.5, 90.2)
    assert sd_over_seeds(scores) == pytest.approx(np.std(scores, ddof=1))
    assert (sd_over_seeds((1.0, 3.0)), sd_over_seeds((1.0,))) == (pytest.approx(math.sqrt(2)), None)
    expected = stats.t.interval(0.9, 3, np.mean(scores), stats.sem(scores))
    assert mean_interval(scores, alpha=0.1) == pytest.approx(expected)
    assert mean_interval((1.0, 2.0)) is None


def test_detectable_difference_and_needed_seeds_belong_together():
    # In standard deviations, at 80 % power; Student's test needs 3.07, 2.02 and 1.32.
    assert [round(detectable(1.0, n), 2) for n in (3, 5, 10)] == [3.64, 2.1, 1.33]
    assert seeds_for(detectable(1.0, 7) + 1e-9, 1.0) == 7
    assert seeds_for(1e-6, 1.0) is None


@pytest.mark.parametrize("seeds", [3, 4, 5, 10])
def test_more_pairs_are_never_promised_smaller_differences(seeds):
    promised = [detectable(1.0, seeds, 0.05 / pairs) for pairs in (1, 2, 5, 10, 18, 28, 45)]
    assert promised == sorted(promised)
    assert math.isfinite(power_of(5.5, 1.0, 3, 0.01))
    assert seeds_for(5.5, 1.0, 0.05 / 28) == 5


@pytest.mark.parametrize(("seeds", "pairs"), [(3, 1), (3, 10), (3, 28), (4, 28), (5, 5), (5, 45), (10, 15)])
def test_the_promised_difference_is_found_four_times_in_five(seeds, pairs):
    """2,000 simulated pairs of arms, tested with the same Welch."""
    rng, shift = np.random.default_rng(seeds * pairs), detectable(1.0, seeds, 0.05 / pairs)
    a, b = rng.normal(shift, 1, (2000, seeds)), rng.normal(0, 1, (2000, seeds))
    seen = np.mean([welch(x, y).p < 0.05 / pairs for x, y in zip(a, b, strict=True)])
    assert seen == pytest.approx(0.8, abs=0.03)


def test_two_arms_without_spread_differ_or_not():
    assert welch([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]).p == 1.0
    assert welch([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]).p == 0.0
    assert math.isnan(paired([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]).correlation)


def test_noise_floor_of_a_held_out_set():
    assert 100 * noise_floor(0.264, 10_000) == pytest.approx(0.363, abs=1e-3)


def test_divergence_is_fishers_or_too_few():
    assert divergence_p((2, 3), (0, 2)) is None
    assert divergence_p((5, 5), (0, 5)) == pytest.approx(stats.fisher_exact([[5, 0], [0, 5]]).pvalue)


def test_shares():
    assert win_share([3.0, 4.0], [1.0, 2.0]) == 1.0
    assert win_share([1.0, 2.0], [1.0, 2.0]) == 0.5
    low, high = wilson(0, 5)
    assert low == pytest.approx(0, abs=1e-12)
    assert high == pytest.approx(0.434, abs=1e-3)


def test_a_run_at_chance_is_stalled_and_one_above_it_is_not():
    assert is_stalled(10.4, 0.1, 10_000)
    assert not is_stalled(11.0, 0.1, 10_000)
    # Ten classes, the largest with 19.6 % of 372 images: an answer that is always the same learned nothing.
    assert is_stalled(19.6, 0.196, 372)


def test_pooled_deviation_is_that_within_arms():
    sd, df = pooled_sd([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]])
    assert (sd, df) == (1.0, 4)


def test_error_on_new_images_is_that_of_a_simulation():
    """Accuracies of new seeds on new images spread as the closed form says, from one draw of bits."""
    rng = np.random.default_rng(5)
    images, seeds = 400, 5

    def bits(shift):
        hard = rng.uniform(0, 1, images)
        chance = np.clip(1.2 - hard + shift * rng.normal(0, 1, images), 0, 1)
        return (rng.uniform(0, 1, (seeds, images)) < chance).astype(np.uint8)

    drawn = [(bits(0.2), bits(0.2)) for _ in range(400)]
    seen = np.std([100 * (a.mean() - b.mean()) for a, b in drawn])

    def difference(a, b):
        return welch(100 * a.mean(1), 100 * b.mean(1), further=image_variance(a, b)[0])

    found = [difference(a, b) for a, b in drawn]
    assert np.sqrt(np.mean([d.error**2 + d.further for d in found])) == pytest.approx(seen, rel=0.12)
    truth = np.mean([100 * (a.mean() - b.mean()) for a, b in drawn])
    intervals = [d.interval(0.05) for d in found]
    assert 0.92 <= np.mean([low <= truth <= high for low, high in intervals]) <= 0.99


def test_new_images_of_paired_arms_leave_out_what_their_seeds_share():
    rng = np.random.default_rng(6)
    chance = np.clip(0.8 + rng.normal(0, 0.1, (5, 1)) - 0.3 * rng.uniform(0, 1, 500), 0, 1)
    a = (rng.uniform(0, 1, (5, 500)) < chance).astype(np.uint8)
    b = np.where(rng.uniform(0, 1, (5, 500)) < 0.02, 1 - a, a).astype(np.uint8)
    assert image_variance(a, b, pairs=True)[1] < 1e4 * 0.1 / 500
    assert image_variance(a, a, pairs=True) == (0.0, 0.0)


NAN = float("nan")
ABSURD = {
    "a deviation below zero": lambda: power_of(1, -1, 5),
    "a deviation of zero": lambda: power_of(1, 0, 5),
    "a deviation that is no number": lambda: power_of(1, NAN, 5),
    "one seed": lambda: detectable(1, 1),
    "a power above one": lambda: detectable(1, 5, power=1.5),
    "a deviation below zero to show": lambda: detectable(-1, 5),
    "a deviation below zero for seeds": lambda: seeds_for(1, -1),
    "no difference": lambda: seeds_for(0, 1),
}


@pytest.mark.parametrize("kind", ABSURD)
def test_arguments_that_no_answer_belongs_to_are_refused(kind):
    with pytest.raises(ConfigError, match="power: needs "):
        ABSURD[kind]()


def test_a_run_without_an_accuracy_is_stalled():
    assert is_stalled(NAN, 0.1, 100)
