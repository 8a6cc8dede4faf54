"""What is left of a norm once its scale and shift are folded away: the statistics or the curve alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.parts.dyt import Derf, DyT
from fathoms.parts.norm import LayerNorm, NoNorm, RMSNorm
from fathoms.parts.residual import LayerScale, Scalar, Unscaled
from fathoms.parts.scaler import LearnableScaler, LearnableScaler2d


class BareLayerNorm(nn.Module):
    """Centre and scale each token: y = (x - mean) / sqrt(var + eps)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalise over the last axis."""
        return F.layer_norm(x, (self.dim,), eps=self.eps).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Two multiplications an element: the square and the scale."""
        return 2 * num_tokens * self.dim


class BareRMSNorm(nn.Module):
    """Scale each token to unit root mean square: y = x / sqrt(mean(x²) + eps)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalise over the last axis."""
        return F.rms_norm(x, (self.dim,), eps=self.eps).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Two multiplications an element: the square and the scale."""
        return 2 * num_tokens * self.dim


class BareDyT(nn.Module):
    """Dynamic tanh without its tail: y = tanh(alpha * x)."""

    def __init__(self, dim: int, alpha: nn.Parameter) -> None:
        super().__init__()
        self.dim, self.alpha = dim, alpha

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Squash each element."""
        return torch.tanh(x * self.alpha).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """One multiplication an element."""
        return num_tokens * self.dim


class BareDerf(nn.Module):
    """Dynamic erf without its tail: y = erf(alpha * x + shift)."""

    def __init__(self, dim: int, alpha: nn.Parameter, shift: nn.Parameter) -> None:
        super().__init__()
        self.dim, self.alpha, self.shift = dim, alpha, shift

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Squash each element."""
        return torch.erf(x * self.alpha + self.shift).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """One multiplication an element."""
        return num_tokens * self.dim


def bare_of(module: nn.Module) -> nn.Module | None:
    """What replaces a part of fathoms whose scale and shift have been folded away; None for other modules."""
    if isinstance(module, LearnableScaler2d):
        return nn.Identity()
    if isinstance(module, LearnableScaler):
        return NoNorm(module.num_channels)
    if isinstance(module, LayerScale):
        return Unscaled(module.gamma.shape[0])
    if isinstance(module, Scalar):
        return Unscaled(module.dim)
    if isinstance(module, LayerNorm):
        return BareLayerNorm(module.normalized_shape[0], module.eps)
    if isinstance(module, RMSNorm):
        return BareRMSNorm(module.normalized_shape[0], module.eps or 1e-6)
    if isinstance(module, DyT):
        return BareDyT(module.dim, module.alpha)
    if isinstance(module, Derf):
        return BareDerf(module.dim, module.alpha, module.shift)
    return None
