"""Placements, where the norms of a residual branch stand, and drop-path, which leaves a branch out.

A branch has three places for a norm: "enter" (on its input), "leave" (on its output) and "outer" (on the stream, after
the addition). A placement names those that it uses, as data that the join reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.registry import Registry, check_name

Site = Literal["enter", "leave", "outer"]


@dataclass(frozen=True)
class Placement:
    """Where the norms of one branch stand.

    Args:
        sites: The places that have a norm, in order; the join calls the first `norm` and the second `post_norm`.
        skip: The constant factor of the skip in the addition.
    """

    sites: tuple[Site, ...]
    skip: float = 1.0


PLACEMENTS: Registry[Placement, None] = Registry("placement")

# Of a branch, by its number from 0 among all branches, and how many of those the network has.
Rule = Callable[[int, int], Placement]


def _everywhere(*sites: Site) -> Rule:
    """The rule that places every branch of a network alike."""

    def rule(branch: int, branches: int) -> Placement:
        del branch, branches
        return Placement(sites)

    return rule


PLACEMENTS.add("pre", summary="x + s F(N x), arXiv:2002.04745.")(_everywhere("enter"))
PLACEMENTS.add("post", summary="N(x + s F x), arXiv:1706.03762.")(_everywhere("outer"))
PLACEMENTS.add("pre_post", summary="x + s N'(F(N x)), arXiv:2502.02732.")(_everywhere("enter", "leave"))
PLACEMENTS.add("res_post", summary="x + s N(F x), arXiv:2111.09883.")(_everywhere("leave"))


@PLACEMENTS.add(
    "keel", summary="N'(2L x + s F(N x)) in L blocks, the first branch x + s F(N x), arXiv:2601.19895."
)
def keel(branch: int, branches: int) -> Placement:
    """KEEL: post-norm whose skip is enlarged by the number of branches, and whose branches have a norm too.

    The first branch has neither: its stream is not normed yet.

    Paper: arXiv:2601.19895.
    """
    return Placement(("enter",)) if branch == 0 else Placement(("enter", "outer"), skip=float(branches))


SCHEDULES = ("uniform", "linear")


class DropPath(nn.Module):
    """Zero a sample's branch with probability `rate` in training, and divide the others by 1 - rate.

    >>> DropPath(0.1).eval()(torch.ones(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Huang et al. 2016, arXiv:1603.09382.
    """

    shares: Tensor | None

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"drop_path={rate} is not a probability below 1; use for example 0.1")
        self.rate = rate
        # A tensor: blocks whose code holds different numbers, as under a linear schedule, would each be compiled.
        if rate:
            self.register_buffer("shares", torch.empty(2), persistent=False)
        else:
            self.shares = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.shares is not None:
            for place, share in enumerate((self.rate, 1.0 - self.rate)):
                self.shares[place].fill_(share)

    def forward(self, x: Float[Tensor, "B *any"]) -> Float[Tensor, "B *any"]:
        """Drop whole samples of x."""
        if self.shares is None or not self.training:
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.shares[0]
        return x * keep.to(x.dtype) / self.shares[1]

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def drop_path_rates(rate: float, depth: int, schedule: str) -> list[float]:
    """The rate of each block: the same everywhere, or rising linearly from 0 to `rate`."""
    check_name(schedule, SCHEDULES, "schedule", "drop_path_schedule")
    if schedule == "uniform":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]
