"""Placements: where the norms of a residual branch stand, as data that the join reads.

A branch has three places for a norm: "enter" (on its input), "leave" (on its output) and "outer" (on the stream, after
the addition). A placement names those that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fathoms.names.registry import Registry

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
