"""Schedules: the learning rate at every epoch is timm's, or LearnableScaler's, and needs nothing but the epoch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fathoms import FathomsError
from fathoms.training.optimization import SCHEDULES, Schedule
from fathoms.training.recipe import Recipe


def schedule_of(sched, lr, epochs, **options):
    return Schedule(Recipe(sched=sched, lr=lr, epochs=epochs, **options))


def timm_rates(sched, epochs, updates=0, **options):
    """The rate that timm sets at the start of every epoch, or of every update."""
    factory = pytest.importorskip("timm.scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.004)
    scheduler, total = factory.create_scheduler_v2(
        optimizer, sched, num_epochs=epochs, step_on_epochs=not updates, updates_per_epoch=updates, **options
    )
    rates = []
    for count in range(int(total * max(updates, 1)) + 1):
        scheduler.step_update(count) if updates else scheduler.step(count)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, total


WARM = [{}, {"warmup_epochs": 5, "warmup_lr": 1e-6}, {"warmup_epochs": 3, "warmup_prefix": True}]
COSINE = [{}, {"min_lr": 1e-5, "cooldown_epochs": 4}]
STEP = [{"decay_epochs": 7, "decay_rate": 0.3}, {"decay_epochs": 2.5}]
SETTINGS = [
    *(("cosine", warm | more) for warm, more in itertools.product(WARM, COSINE)),
    *(("step", warm | more) for warm, more in itertools.product(WARM, STEP)),
]


@pytest.mark.parametrize(("sched", "options"), SETTINGS, ids=str)
@pytest.mark.parametrize("epochs", [20, 33])
def test_every_epoch_agrees_with_timm(sched, options, epochs):
    """Relative 1e-12: the same formula in float64, summed in another order."""
    rates, total = timm_rates(sched, epochs, **options)
    schedule = schedule_of(sched, 0.004, epochs, **options)
    assert schedule.recipe.total_epochs == total
    assert [schedule.lr(epoch) for epoch in range(total + 1)] == pytest.approx(rates, rel=1e-12, abs=1e-18)
    assert schedule.lr(7.9) == schedule.lr(7)


@pytest.mark.parametrize(("sched", "options"), SETTINGS, ids=str)
def test_every_update_agrees_with_timm(sched, options):
    rates, total = timm_rates(sched, 20, updates=7, **options)
    schedule = schedule_of(sched, 0.004, 20, sched_on_updates=True, **options)
    ours = [schedule.lr(update / 7) for update in range(total * 7 + 1)]
    assert ours == pytest.approx(rates, rel=1e-9, abs=1e-12)


def test_custom_has_the_seeds_values():
    """FACTS section 5, to the digits given there."""
    schedule = schedule_of("custom", 0.005, 300, epoch_factor=0.8, epoch_threshold=0.5)
    rates = [schedule.lr(epoch) for epoch in (0, 100, 150, 174, 198)]
    assert [round(rate, 5) for rate in rates] == [0.004, 0.003, 0.002, 0.00165, 0.0013]
    assert round(schedule.lr(250), 6) == 0.000335
    assert schedule.lr(174) == schedule_of("custom", 0.005, 300).lr(174)


@pytest.mark.parametrize("epochs", [1, 2, 10, 90, 300])
@pytest.mark.parametrize(("factor", "threshold"), [(0.8, 0.5), (0.5, 0.9), (1.0, 0.0), (0.7, 1.0)])
def test_custom_is_three_pieces_at_any_length(epochs, factor, threshold):
    schedule = schedule_of("custom", 1.0, epochs, epoch_factor=factor, epoch_threshold=threshold)

    def c(epoch):
        return (1 + math.cos(math.pi * epoch / epochs)) / 2

    leaves, rejoins = threshold * epochs, int(0.66 * epochs)
    for epoch in range(epochs):
        if epoch < leaves:
            expected = factor * c(epoch)
        elif epoch < rejoins:
            share = (epoch - leaves) / (rejoins - leaves)
            expected = (1 - share) * factor * c(leaves) + share * c(rejoins)
        else:
            expected = c(epoch)
        assert schedule.lr(epoch) == pytest.approx(expected, rel=1e-12)
    assert schedule.lr(epochs) == 0.0


def test_custom_warms_up_and_keeps_a_minimum_where_asked():
    schedule = schedule_of("custom", 1.0, 10, warmup_epochs=2, warmup_lr=0.0, min_lr=0.1, cooldown_epochs=2)
    assert [schedule.lr(epoch) for epoch in (0, 1, 10, 11)] == [0.0, 0.5, 0.1, 0.1]
    assert schedule.recipe.total_epochs == 12
    plain = schedule_of("custom", 1.0, 10)
    assert schedule.lr(5) == pytest.approx(0.1 + 0.9 * plain.lr(5))


def test_wsd_is_flat_and_then_falls_to_the_minimum():
    schedule = schedule_of(
        "wsd", 1.0, 100, warmup_epochs=10, warmup_lr=0.0, min_lr=0.2, sched_on_updates=True
    )
    assert schedule.lr(5) == 0.5
    assert {schedule.lr(epoch) for epoch in range(10, 81)} == {1.0}
    assert schedule.lr(85) == pytest.approx(0.2 + 0.8 * 0.5)
    assert schedule.lr(100) == 0.2
    assert schedule_of("wsd", 1.0, 100, decay_epochs=50).lr(62.5) < 1.0


def test_constant_stays():
    schedule = schedule_of("constant", 0.3, 5, warmup_epochs=1, warmup_lr=0.1)
    assert [schedule.lr(epoch) for epoch in (0, 1, 5, 50)] == [0.1, 0.3, 0.3, 0.3]


@pytest.mark.parametrize("sched", list(SCHEDULES))
def test_every_schedule_lies_between_minimum_and_base(sched):
    schedule = schedule_of(sched, 0.01, 12, sched_on_updates=sched != "constant")
    rates = [schedule.lr(update / 10) for update in range(121)]
    assert all(0 <= rate <= 0.01 for rate in rates)
    assert SCHEDULES.summary(sched)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"sched": "cosin"},
            "--sched: no value is called 'cosin'; did you mean 'cosine'?",
            marks=pytest.mark.plain,
        ),
        ({"lr": 0.0}, "--lr 0.0: use a number above 0"),
        ({"lr": math.nan}, "--lr=nan"),
        ({"epochs": 0}, "--epochs 0"),
        ({"min_lr": 1.0}, "--min-lr 1.0: is above --lr 0.1; lower it"),
        ({"min_lr": -1.0}, "--min-lr -1.0"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs -1"),
        ({"decay_epochs": 3.0}, "--decay-epochs would not be used: it needs --sched step or wsd"),
        ({"epoch_factor": 0.8}, "--epoch-factor would not be used: it needs --sched custom"),
        ({"sched": "step", "decay_rate": 0.0}, "--decay-rate 0.0"),
        ({"sched": "step", "cooldown_epochs": 3.0}, "--cooldown-epochs would not be used"),
        ({"sched": "custom", "epoch_threshold": 2.0}, "--epoch-threshold 2.0"),
        ({"sched": "constant", "min_lr": 1e-5}, "--min-lr would not be used"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(FathomsError, match=message.replace("?", r"\?")) as caught:
        schedule_of(**{"sched": "cosine", "lr": 0.1, "epochs": 10} | options)
    assert "\n" not in str(caught.value)


def test_a_warm_up_that_outlasts_the_run_is_said():
    (line,) = schedule_of("cosine", 0.001, 2, warmup_epochs=5).notices()
    assert line == (
        "--warmup-epochs 5: the warm-up is longer than the run of 2 epochs, so that the rate never reaches --lr 0.001"
    )
    assert schedule_of("cosine", 0.001, 2, warmup_epochs=5, warmup_prefix=True).notices() == []
    assert schedule_of("cosine", 0.001, 5, warmup_epochs=5).notices() == []
