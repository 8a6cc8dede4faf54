"""Drop-path (stochastic depth): drop a whole residual branch for some samples of a batch."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.names.registry import check_name

SCHEDULES = ("uniform", "linear")


class DropPath(nn.Module):
    """Zero a sample's branch with probability `rate` in training, and divide the others by 1 - rate.

    >>> DropPath(0.1).eval()(torch.ones(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Huang et al. 2016, arXiv:1603.09382.
    """

    shares: Tensor

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"drop_path={rate} is not a probability below 1; use for example 0.1")
        self.rate, self.drops = rate, rate > 0.0
        # A tensor: blocks whose code holds different numbers, as under a linear schedule, would each be compiled.
        self.register_buffer("shares", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The shares of samples that are dropped and kept."""
        for place, share in enumerate((self.rate, 1.0 - self.rate)):
            self.shares[place].fill_(share)

    def forward(self, x: Float[Tensor, "B *any"]) -> Float[Tensor, "B *any"]:
        """Drop whole samples of x."""
        if not (self.drops and self.training):
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.shares[0]
        return x * keep.to(x.dtype) / self.shares[1]

    def extra_repr(self) -> str:
        """Show the rate."""
        return f"rate={self.rate:g}"


def drop_path_rates(rate: float, depth: int, schedule: str) -> list[float]:
    """The rate of each block: the same everywhere, or rising linearly from 0 to `rate`."""
    check_name(schedule, SCHEDULES, "schedule", "drop_path_schedule")
    if schedule == "uniform":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]
