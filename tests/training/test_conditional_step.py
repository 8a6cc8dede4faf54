"""A skipped step changes nothing, and a step that is not skipped is the optimizer's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fathoms import create_model, param_groups
from fathoms.errors import ConfigError
from fathoms.training.checkpoint_save import optimizer_state
from fathoms.training.optimization import OPTIMIZERS, build_optimizer
from fathoms.training.optimizer_step import put_back_, step_unless, zero_
from fathoms.training.step import ConditionalStep

FUSED = ("adamw", "muon")
OURS = ("lamb", "muon")


def small_model():
    torch.manual_seed(0)
    switches = {"dim": 16, "depth": 2, "heads": 2, "image_size": 8, "patch_size": 4, "num_classes": 3}
    return create_model("vit_tiny_patch16_224", **switches)


def with_gradients(model, spoilt=False):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    if spoilt:
        model.blocks[0].attn.qkv.weight.grad[0, 0] = float("nan")
        model.head.bias.grad[1] = float("inf")


def optimizer_of(model, name):
    # The fused kernels of the CPU keep the same promise as those of a GPU.
    return build_optimizer(
        param_groups(model, weight_decay=0.1), name, lr=0.01, fused=True if name in FUSED else None
    )


def bits(model, optimizer):
    moments, record = optimizer_state(optimizer)
    tensors = {**dict(model.named_parameters()), **moments}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, copy.deepcopy(record)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_held_step_changes_nothing_and_the_next_is_as_if_it_had_not_been(name, steps_before):
    ends = []
    for holds in (False, True):
        model = small_model()
        optimizer = optimizer_of(model, name)
        conditional = ConditionalStep(model, optimizer)
        conditional._stepped = True
        for _ in range(steps_before):
            with_gradients(model)
            step_unless(optimizer, torch.tensor(0.0))
        before = bits(model, optimizer)
        if holds:
            with_gradients(model, spoilt=True)
            step_unless(optimizer, torch.tensor(1.0))
            conditional.settle(held=True)
            after = bits(model, optimizer)
            for key, tensor in before[0].items():
                assert torch.equal(after[0][key], tensor), key
            assert all(not tensor.any() for key, tensor in after[0].items() if key not in before[0])
        with_gradients(model)
        step_unless(optimizer, torch.tensor(0.0))
        ends.append(bits(model, optimizer))
    (plain, record), (held, held_record) = ends
    assert plain.keys() == held.keys()
    assert all(torch.equal(plain[key], held[key]) for key in plain)
    assert record == held_record


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_that_is_not_held_is_the_optimizers_own(name):
    ends = []
    for step in (
        lambda optimizer: optimizer.step(),
        lambda optimizer: step_unless(optimizer, torch.tensor(0.0)),
    ):
        model = small_model()
        optimizer = optimizer_of(model, name)
        for _ in range(3):
            with_gradients(model)
            step(optimizer)
        ends.append(bits(model, optimizer)[0])
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_bits_come_back_even_from_nan(dtype):
    before = [torch.tensor([1.5, -0.0, 3e4]).to(dtype), torch.tensor(2.0).to(dtype)]
    now = [torch.full_like(before[0], 7), torch.full_like(before[1], 9)]
    if dtype.is_floating_point:
        now[0][0] = float("nan")
    kept = [tensor.clone() for tensor in now]
    put_back_(now, before, torch.tensor(0.0))
    assert all(torch.equal(a, b) or dtype.is_floating_point for a, b in zip(now, kept, strict=True))
    assert now[0].view(torch.uint8).tolist() == kept[0].view(torch.uint8).tolist()
    put_back_(now, before, torch.tensor(1.0))
    assert now[0].view(torch.uint8).tolist() == before[0].view(torch.uint8).tolist()
    zero_(kept, torch.tensor(1.0))
    assert not any(tensor.any() for tensor in kept)


def test_a_batchnorms_statistics_survive_a_bad_batch():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    conditional = ConditionalStep(model, optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    conditional.begin()
    model(torch.full((8, 4), float("nan"))).sum().backward()
    conditional.step(torch.tensor(1.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    conditional.begin()
    model(torch.randn(8, 4)).sum().backward()
    conditional.step(torch.tensor(0.0))
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("name", OURS)
def test_gradients_that_are_still_scaled_are_refused(name):
    model = small_model()
    optimizer = optimizer_of(model, name)
    with_gradients(model)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    with pytest.raises(ConfigError, match="the gradients are scaled; call the scaler's unscale_"):
        optimizer.step()
