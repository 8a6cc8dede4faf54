"""The facts about optimizers are those of the optimizers."""

import inspect
from typing import get_args

import pytest
import torch

from fathoms import ViT, ViTConfig, param_groups
from fathoms.models.param_groups import state_bytes
from fathoms.optimizer_facts import OPTIMIZER_FACTS, OptimizerName
from fathoms.training.optimization import OPTIMIZERS, build_optimizer


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_has_the_size_that_is_counted_beforehand(name, frozen):
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=16, heads=2, depth=2, num_classes=3))
    model.stem.requires_grad_(not frozen)
    optimizer = build_optimizer(param_groups(model, weight_decay=0.05), name, lr=1e-3)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert sum(value.numel() * value.element_size() for value in kept) == state_bytes(model, name)


def test_every_optimizer_has_its_facts_and_takes_the_options_that_they_name():
    assert set(OPTIMIZERS) == set(OPTIMIZER_FACTS) == set(get_args(OptimizerName))
    for name, facts in OPTIMIZER_FACTS.items():
        taken = inspect.signature(OPTIMIZERS[name]).parameters
        assert ("betas" in taken, "eps" in taken, "momentum" in taken) == (
            facts.betas,
            facts.betas,
            facts.momentum,
        )
