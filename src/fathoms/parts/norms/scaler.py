"""LearnableScaler: a learned affine map in place of a norm."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.names.registry import check_name
from fathoms.parts.norms.norm import NORMS

ScalerInit = Literal["normal", "ones"]


@NORMS.add("learnable_scaler")
class LearnableScaler(nn.Module):
    """A learned affine map in place of a norm: y = a * x + b, without statistics.

    Args:
        num_channels: Length of `a` and `b`.
        eps: Accepted for LayerNorm's signature and not used.
        affine: False leaves `a` and `b` out, which makes this the identity.
        init: "normal" draws a from N(0, 1), as the authors' code does; "ones" starts at the identity.

    >>> LearnableScaler(192, init="ones")(torch.ones(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    From: github.com/nghiemtuan/LearnableScaler; with init="ones" it is ResMLP's Affine, arXiv:2105.03404.
    """

    affine_names = ("a", "b")

    def __init__(
        self, num_channels: int, eps: float = 1e-6, affine: bool = True, init: ScalerInit = "normal"
    ) -> None:
        super().__init__()
        self.num_channels, self.eps = num_channels, eps
        self.init = check_name(init, ("normal", "ones"), "init", type(self).__name__)
        self.a = nn.Parameter(torch.empty(num_channels)) if affine else None
        self.b = nn.Parameter(torch.empty(num_channels)) if affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise `a` by `init`; `b` is zero."""
        if self.a is not None and self.b is not None:
            nn.init.normal_(self.a) if self.init == "normal" else nn.init.ones_(self.a)
            nn.init.zeros_(self.b)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Scale and shift each channel, the last axis."""
        if self.a is None or self.b is None:
            return x
        return (x * self.a + self.b).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """One multiplication per element; for maps, `num_tokens` is the number of positions."""
        return 0 if self.a is None else num_tokens * self.num_channels


class LearnableScaler2d(LearnableScaler):
    """LearnableScaler for convolutional maps (B, C, H, W), in place of a BatchNorm.

    >>> LearnableScaler2d(64)(torch.randn(2, 64, 8, 8)).shape
    torch.Size([2, 64, 8, 8])

    From: github.com/nghiemtuan/LearnableScaler.
    """

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Scale and shift each channel, the second axis."""
        if self.a is None or self.b is None:
            return x
        return (x * self.a[:, None, None] + self.b[:, None, None]).to(x.dtype)
