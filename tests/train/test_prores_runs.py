"""Training with ProRes: the warm-up follows the number of updates, and a cut run ends as one that was not cut."""

from __future__ import annotations

import pytest

from tiny_runs import ON_DIGITS, TinyRuns, stop_after_update

WARMING = ("--residual", "prores", "--residual-warmup", "0.6", "--model-ema")


@pytest.fixture
def runs(tmp_path):
    return TinyRuns(tmp_path, ON_DIGITS)


def factors(module):
    return [block.attn_join.scale.factor.item() for block in module.blocks]


def test_the_warmup_follows_the_updates_and_ends_in_the_plain_network(runs):
    trainer = runs.trainer(*WARMING)
    seen = []
    accumulate = trainer.loop.stepper.accumulate

    def watched(*args, **options):
        seen.append((trainer.loop.state.updates, factors(trainer.model), factors(trainer.learner.ema.module)))
        return accumulate(*args, **options)

    trainer.loop.stepper.accumulate = watched
    assert trainer.run().code == 0
    total = len(seen)
    for update, own, averaged in seen:
        expected = [min(update / total * 2 / (0.6 * block), 1.0) for block in (1, 2)]
        assert own == pytest.approx(expected)
        assert averaged == own
    assert seen[-1][1] == [1.0, 1.0]


@pytest.mark.parametrize("cut", [5, 11])
def test_a_cut_run_ends_as_one_that_was_not(runs, cut):
    runs.train(*WARMING, name="whole")
    trainer = runs.trainer(*WARMING, "--recovery-interval", "3", name="cut")
    stop_after_update(trainer, cut)
    assert trainer.run().code == 143
    assert runs.train(*WARMING, "--recovery-interval", "3", name="cut").code == 0
    assert runs.same("cut", "whole")
