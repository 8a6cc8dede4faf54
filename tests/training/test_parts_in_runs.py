"""The parts of 2025 and 2026 in whole runs: two ranks with sharded parameters, and a run that was cut."""

from __future__ import annotations

import pytest

from rank_pairs import ends, pair
from tiny_parts import TOGETHER
from tiny_runs import ON_DIGITS, TinyRuns, stop_after_update


@pytest.fixture
def runs(tmp_path):
    return TinyRuns(tmp_path, [*ON_DIGITS, "--depth", "3", "--crop", "whole", "--epochs", "1"])


def flags(parts):
    """The options as a user writes them."""
    return [
        word
        for name, value in TOGETHER[parts].items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


@pytest.mark.parametrize("parts", TOGETHER)
def test_two_ranks_that_shard_the_parts_train_as_one_does(runs, parts):
    # Each rank draws its own drop-path.
    words = [*flags(parts), "--drop-path", "0"]
    runs.train(*words, name="one")
    line = runs.words(*words, "--batch-size", "48", "--fsdp", name="two")
    results = ends(pair(runs.root, line, line))
    assert [code for _, code in results] == [0, 0], results[0][0][-4000:]
    alone, together = ([row["loss"] for row in runs.metrics(name)] for name in ("one", "two"))
    # The same samples in the same updates; sums in another order.
    assert together == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("parts", TOGETHER)
def test_a_cut_run_of_the_parts_ends_as_one_that_was_not(runs, parts):
    words = [*flags(parts), "--model-ema", "--recovery-interval", "3"]
    runs.train(*words, name="whole")
    trainer = runs.trainer(*words, name="cut")
    stop_after_update(trainer, 5)
    assert trainer.run().code == 143
    assert runs.train(*words, name="cut").code == 0
    assert runs.same("cut", "whole")


WARMING = ("--residual", "prores", "--residual-warmup", "0.6", "--model-ema")


def factors(module):
    return [block.attn_join.scale.factor.item() for block in module.blocks]


def test_the_warmup_follows_the_updates_and_ends_in_the_plain_network(tmp_path):
    trainer = TinyRuns(tmp_path, ON_DIGITS).trainer(*WARMING)
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
