"""Hooks are gone when their block ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fathoms.parts.modes import hooked


def test_every_hook_is_removed_also_when_the_block_raises():
    linear, calls = nn.Linear(2, 2), []
    handles = (
        linear.register_forward_pre_hook(lambda *_: calls.append("before")),
        linear.register_forward_hook(lambda *_: calls.append("after")),
    )
    with pytest.raises(RuntimeError, match="shapes"), hooked(*handles):
        linear(torch.ones(1, 3))
    linear(torch.ones(1, 2))
    assert calls == ["before"]
