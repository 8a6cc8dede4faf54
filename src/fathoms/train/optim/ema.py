"""Exponential moving average (EMA) of a model's weights, which often generalises better than the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError, WeightsError
from fathoms.models.weights import weights_of

# The warm-up's exponent: decay 0.999 is reached after 31,600 updates.
WARMUP_POWER = 2 / 3


class Ema:
    """Moving average of all parameters and buffers: average = decay * average + (1 - decay) * weights.

    Floating-point buffers are averaged, integer buffers are copied. The decay is a function of the number of updates
    alone, so a resumed run needs the averaged weights and nothing else. torch's AveragedModel reads its counter from
    the device at every update; this does not wait for the device.

    Args:
        model: The model, without any wrapper; the average starts as a copy of it. FSDP2 cannot copy a sharded model:
            build this first, then shard `module` like the model.
        decay: Weight of the old average.
        warmup: Whether the decay rises with the number of updates u, as min(decay, 1 - u^(-2/3)).

    >>> ema = Ema(nn.Linear(3, 2), decay=0.9)
    >>> ema.update(nn.Linear(3, 2), updates=1)
    >>> sorted(ema.module.state_dict())
    ['bias', 'weight']
    """

    def __init__(self, model: nn.Module, decay: float = 0.9998, warmup: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"--model-ema-decay {decay}: must be between 0 and 1; 0.9998 is usual")
        self.decay, self.warmup = decay, warmup
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        # Tables that are not saved depend on the image size, which may differ between the two.
        self._saved = set(self.module.state_dict())

    def decay_at(self, updates: int) -> float:
        """The decay of an update, from its number counted from 1; the first one copies the weights."""
        if updates <= 1:
            return 0.0
        return min(self.decay, 1 - updates**-WARMUP_POWER) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int, instead: Mapping[Tensor, Tensor] | None = None) -> None:
        """Move the average towards `model`, whose number of updates is `updates`.

        Args:
            model: The model that the average was built from.
            updates: Its number of updates.
            instead: By buffer of the model, the values to average where forward passes have moved it on since.
        """
        instead = {} if instead is None else instead
        ours, theirs = weights_of(self.module, self._saved), weights_of(model, self._saved)
        if ours.keys() != theirs.keys():
            odd = min(ours.keys() ^ theirs.keys())
            raise WeightsError(
                f"ema: {odd!r} is in one of the two models only; give the model that the average was built from"
            )
        averages, weights = [], []
        for name, average in ours.items():
            current = instead.get(theirs[name], theirs[name])
            if average.is_floating_point():
                averages.append(average)
                weights.append(current.to(average.dtype))
            else:
                average.copy_(current)
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay_at(updates))
