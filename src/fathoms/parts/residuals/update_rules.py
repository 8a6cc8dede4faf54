"""Residual methods that make the update of the stream from both the branch and the stream."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.ops.autocast import widened
from fathoms.parts.init import exempt_from_decay
from fathoms.parts.residuals.residual import RESIDUALS, Method


@RESIDUALS.add("orthogonal", Method(place="update"))
class OrthogonalUpdate(nn.Module):
    """Add only what is orthogonal to the stream: y = f - (<x, f> / (|x|² + eps)) x, for each token.

    The part of a branch f along the stream x only changes its length, which a norm takes out again. Nothing is
    learned. Computed in float32.

    >>> OrthogonalUpdate(2)(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]])).round(decimals=3)
    tensor([[0., 1.]])

    Paper: Oh et al. 2025, arXiv:2505.11881.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(
        self, branch: Float[Tensor, "*batch D"], stream: Float[Tensor, "*batch D"]
    ) -> Float[Tensor, "*batch D"]:
        """The update of the stream."""
        f, x = widened(branch), widened(stream)
        along = (x * f).sum(-1, keepdim=True) / (x.square().sum(-1, keepdim=True) + self.eps)
        return (f - along * x).to(branch.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Two inner products, one division for each token, and the multiple of the stream."""
        return num_tokens * (3 * self.dim + 1)


@RESIDUALS.add("mv_split", Method(place="update", takes=("prefix",), reads_patches=True))
class MeanVarianceSplit(nn.Module):
    """Scale the tokens' mean and their differences apart: y = beta (f - mean f) + alpha (mean f - mean x).

    Means are over the patches of an image. The `prefix` tokens in front of them (class token, registers) take
    y = beta f, which is ours: the paper has patches only. Alpha starts at 0 and beta at 0.03, one number for each
    channel, without weight decay. Attention keeps the mean of the tokens and shrinks their differences, so that in
    hundreds of blocks the mean takes over; here it follows the branches instead of adding up.

    >>> rule = MeanVarianceSplit(192, prefix=1)
    >>> rule(torch.randn(2, 197, 192), torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Lu 2026, arXiv:2605.06169.
    """

    def __init__(self, dim: int, prefix: int = 0) -> None:
        super().__init__()
        self.prefix = prefix
        self.alpha = nn.Parameter(torch.empty(dim))
        self.beta = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at alpha = 0 and beta = 0.03."""
        nn.init.zeros_(self.alpha)
        nn.init.constant_(self.beta, 0.03)
        exempt_from_decay(self.alpha)
        exempt_from_decay(self.beta)

    def forward(
        self, branch: Float[Tensor, "*batch N D"], stream: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """The update of the stream."""
        tokens, wide = branch.shape[-2], torch.promote_types(branch.dtype, torch.float32)
        mean_f, mean_x = (
            x[..., self.prefix :, :].mean(-2, keepdim=True, dtype=wide) for x in (branch, stream)
        )
        shift = self.alpha * (mean_f - mean_x) - self.beta * mean_f
        # Zero at the prefix, without a copy of the tokens.
        patch = torch.arange(tokens, device=branch.device).unsqueeze(-1) >= self.prefix
        return (branch * self.beta + patch * shift).to(branch.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Both means, the shift of the patches, and beta on each element."""
        return self.alpha.shape[0] * (num_tokens + 4)
