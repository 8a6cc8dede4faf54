"""The statistics of a comparison against other implementations and on planted truths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower

from fathoms.compare.statistics import (
    detectable,
    divergence_p,
    holm,
    holm_levels,
    is_stalled,
    noise_floor,
    on_new_images,
    paired,
    pooled_sd,
    power_of,
    seeds_for,
    welch,
    wilson,
    win_share,
)


@pytest.mark.parametrize("sizes", [(3, 3), (5, 7), (10, 4)])
def test_welch_is_scipys(sizes):
    rng = np.random.default_rng(sum(sizes))
    a, b = rng.normal(0, 1, sizes[0]), rng.normal(1, 3, sizes[1])
    ours, theirs = welch(a, b), stats.ttest_ind(a, b, equal_var=False)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-12)
    for level in (0.9, 0.95, 0.999):
        assert ours.interval(1 - level) == pytest.approx(tuple(theirs.confidence_interval(level)), rel=1e-9)


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
    assert [is_rejected for _, is_rejected in holm_levels(ps)] == rejected.tolist()


def test_the_corrected_interval_leaves_zero_out_exactly_where_holm_rejects():
    rng = np.random.default_rng(3)
    for _ in range(50):
        differences = [welch(rng.normal(k / 2, 1, 5), rng.normal(0, 1, 5)) for k in range(6)]
        for (level, rejected), difference in zip(
            holm_levels([d.p for d in differences]), differences, strict=True
        ):
            low, high = difference.interval(level)
            assert (low > 0 or high < 0) == rejected


def test_power_nears_that_of_students_test_and_is_below_it():
    """statsmodels knows the power of Student's test; Welch's has fewer degrees of freedom."""
    for seeds, difference, near in ((3, 3.0, 0.12), (5, 2.0, 0.03), (20, 0.9, 0.002)):
        theirs = TTestIndPower().power(difference, seeds, 0.05)
        assert theirs - near < power_of(difference, 1.0, seeds) < theirs


def test_detectable_difference_and_needed_seeds_belong_together():
    # In standard deviations, at 80 % power; Student's test needs 3.07, 2.02 and 1.32.
    assert [round(detectable(1.0, n), 2) for n in (3, 5, 10)] == [3.51, 2.08, 1.33]
    assert seeds_for(detectable(1.0, 7) + 1e-9, 1.0) == 7
    assert seeds_for(1e-6, 1.0) is None


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
    assert is_stalled(10.4, 10, 10_000)
    assert not is_stalled(11.0, 10, 10_000)


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
    said = np.sqrt(np.mean([on_new_images(a, b).error ** 2 for a, b in drawn]))
    assert said == pytest.approx(seen, rel=0.12)
    truth = np.mean([100 * (a.mean() - b.mean()) for a, b in drawn])
    intervals = [on_new_images(a, b).interval(0.05) for a, b in drawn]
    assert 0.92 <= np.mean([low <= truth <= high for low, high in intervals]) <= 0.98


def test_new_images_of_paired_arms_leave_out_what_their_seeds_share():
    rng = np.random.default_rng(6)
    chance = np.clip(0.8 + rng.normal(0, 0.1, (5, 1)) - 0.3 * rng.uniform(0, 1, 500), 0, 1)
    a = (rng.uniform(0, 1, (5, 500)) < chance).astype(np.uint8)
    b = np.where(rng.uniform(0, 1, (5, 500)) < 0.02, 1 - a, a).astype(np.uint8)
    assert on_new_images(a, b, pairs=True).error < 0.5 * on_new_images(a, b).error
    assert on_new_images(a, b, pairs=True).value == pytest.approx(100 * (a.mean() - b.mean()))
    assert on_new_images(a, a, pairs=True).interval(0.05) == (0.0, 0.0)
