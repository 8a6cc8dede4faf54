"""One update of the Stepper: accumulated gradients, a skipped update, the seed of a batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fathoms.training.step import batch_seed


@pytest.fixture
def trainer(tiny_runs):
    return tiny_runs.trainer("--model-ema", "--model-ema-decay", "0.5", "--drop-path", "0.2")


def batches(trainer, count):
    return list(itertools.islice(trainer.context.data.train.epoch(0), count))


def gradients(trainer):
    found = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    trainer.loop.stepper.clear()
    return found


def weights(module):
    return [value.clone() for value in module.state_dict().values()]


def test_accumulated_gradients_are_the_mean_of_their_batches(trainer):
    pair, stepper = batches(trainer, 2), trainer.loop.stepper
    alone = []
    for batch in pair:
        stepper.accumulate(batch, parts=1, first=True)
        alone.append(gradients(trainer))
    for number, batch in enumerate(pair):
        stepper.accumulate(batch, parts=2, first=number == 0)
    for both, one, other in zip(gradients(trainer), *alone, strict=True):
        assert torch.allclose(both, (one + other) / 2, atol=1e-7)


def test_a_model_that_was_left_in_inference_trains_all_the_same(tiny_runs):
    """With drop-path, which inference does not have."""
    trainer = tiny_runs.trainer("--residual", "none", "--drop-path", "0.5")
    [batch], stepper, losses = batches(trainer, 1), trainer.loop.stepper, []
    for mode in (True, False):
        trainer.model.train(mode)
        stepper.accumulate(batch, parts=1, first=True)
        losses.append(stepper.pending[0].item())
        stepper.clear()
    assert losses[0] == losses[1]


def test_a_replayed_batch_has_the_loss_it_had(trainer):
    [batch] = batches(trainer, 1)
    trainer.loop.stepper.accumulate(batch, parts=1, first=True)
    first = trainer.loop.stepper.pending[0] / trainer.loop.stepper.pending[3]
    torch.manual_seed(1)
    assert float(trainer.loop.stepper.replay(batch).detach()) == pytest.approx(float(first), abs=1e-7)


@pytest.mark.parametrize("bad", [False, True])
def test_an_update_is_reported_once_and_skipped_if_it_is_not_finite(trainer, bad):
    [batch], stepper, state = batches(trainer, 1), trainer.loop.stepper, trainer.loop.state
    # The first update copies the weights; an average of other numbers tells whether it was taken.
    trainer.learner.ema.module.blocks[0].attn.qkv.weight.zero_()
    before, average = weights(trainer.model), weights(trainer.learner.ema.module)
    stepper.accumulate(batch, parts=1, first=True)
    norm = stepper.gradient_norm()
    assert stepper.finish_previous() is None
    state.batch = 1
    stepper.apply(state, norm * (math.inf if bad else 1), lr=0.1, vote=0)
    report = stepper.finish_previous()
    assert (report.update, report.epoch, report.batches, report.nonfinite) == (0, 0, (0, 1), bad)
    assert stepper.finish_previous() is None
    for now, then in ((trainer.model, before), (trainer.learner.ema.module, average)):
        assert all(torch.equal(a, b) for a, b in zip(weights(now), then, strict=True)) == bad
    assert float(state.sums[3]) == (0 if bad else len(batch))
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize(
    "amp", [[], ["--precision", "autocast", "--amp-dtype", "float16"]], ids=["fp32", "fp16"]
)
def test_the_clipped_gradient_has_the_norm_that_was_asked_for(tiny_runs, amp):
    """One update of plain SGD moves the weights by the rate times the norm, whatever float16's loss scale is."""
    plain = ["--opt", "momentum", "--momentum", "0", "--weight-decay", "0", "--lr", "0.5"]
    plain += ["--warmup-epochs", "0"]
    trainer = tiny_runs.trainer(*plain, "--clip-grad", "0.01", *amp, "--epochs", "1", "--batch-size", "256")
    before = weights(trainer.model)
    trainer.run()
    moved = torch.stack(
        [(now - then).norm() for now, then in zip(weights(trainer.model), before, strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_the_gradient_is_clipped_as_timm_clips_it(tiny_runs):
    dispatch_clip_grad = pytest.importorskip("timm.utils").dispatch_clip_grad
    trainer = tiny_runs.trainer("--clip-grad", "0.01")
    [batch], stepper = batches(trainer, 1), trainer.loop.stepper
    stepper.accumulate(batch, parts=1, first=True)
    twins = [nn.Parameter(parameter.detach()) for parameter in trainer.model.parameters()]
    for twin, parameter in zip(twins, trainer.model.parameters(), strict=True):
        twin.grad = parameter.grad.clone()
    dispatch_clip_grad(twins, 0.01, mode="norm")
    stepper.gradient_norm()
    for twin, clipped in zip(twins, gradients(trainer), strict=True):
        assert torch.equal(twin.grad, clipped)


def test_each_batch_has_a_seed_of_its_own():
    places = list(itertools.product(range(3), range(3), range(3), range(2)))
    assert len({batch_seed(*place) for place in places}) == len(places)


def test_ddp_averages_over_ranks_once_an_update(trainer):
    stepper, pair, sent = trainer.loop.stepper, batches(trainer, 2), []

    def average(_state, bucket):
        sent.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def accumulated():
        for number, batch in enumerate(pair):
            stepper.accumulate(batch, parts=2, first=number == 0)
        return gradients(trainer)

    expected = accumulated()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(trainer.learner.model)
        wrapped.register_comm_hook(None, average)
        stepper.learner = trainer.learner._replace(compute_model=wrapped)
        found = accumulated()
    finally:
        dist.destroy_process_group()
    assert sent == sorted(set(sent)), "every bucket once"
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
