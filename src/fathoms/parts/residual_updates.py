"""Residual methods beyond a scale: updates that read the stream too, and ProRes, whose factors follow the run."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.ops.dispatch import in_dtype, wide, widened
from fathoms.parts.residuals import RESIDUALS, Method


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
        f, x = widened(branch), widened(stream)
        along = (x * f).sum(-1, keepdim=True) / (x.square().sum(-1, keepdim=True) + self.eps)
        return in_dtype(f - along * x, branch.dtype)

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

    exempt_from_decay = ("alpha", "beta")

    def __init__(self, dim: int, prefix: int = 0) -> None:
        super().__init__()
        self.prefix = prefix
        self.alpha = nn.Parameter(torch.empty(dim))
        self.beta = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)
        nn.init.constant_(self.beta, 0.03)

    def forward(
        self, branch: Float[Tensor, "*batch N D"], stream: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        own, tokens = wide(branch.dtype), branch.shape[-2]
        mean_f, mean_x = (
            x[..., self.prefix :, :].mean(-2, keepdim=True, dtype=own) for x in (branch, stream)
        )
        shift = self.alpha * (mean_f - mean_x) - self.beta * mean_f
        # Zero at the prefix, without a copy of the tokens.
        patch = torch.arange(tokens, device=branch.device).unsqueeze(-1) >= self.prefix
        return in_dtype(branch * self.beta + patch * shift, branch.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Both means, the shift of the patches, and beta on each element."""
        return self.alpha.shape[0] * (num_tokens + 4)


# Share of a run by which the last block counts in full, where none is given.
SHARE = 0.2


@RESIDUALS.add("prores", Method(takes=("depth", "index", "warmup")))
class ProgressiveResidual(nn.Module):
    """y = min(t / (T l), 1) x in block l = 1 … L at update t, and y = x after the warm-up of T L updates.

    `set_progress` sets the factor; until it is called, and so in every model that is not being trained, the factor is
    one. It is a tensor on the device, so that graphs, compiled code and copies of the model read it anew, and it
    follows from the number of updates, so nothing is saved.

    Args:
        dim: Width of a token.
        depth: Number of blocks L.
        index: The block's index l - 1.
        warmup: T L as a share of the whole run; the paper has T = 1000 updates at 24 blocks.

    >>> rule = ProgressiveResidual(192, depth=12, index=0)
    >>> rule(torch.ones(2, 197, 192)).shape, rule.factor_at(progress=0.0), rule.factor_at(progress=0.5)
    (torch.Size([2, 197, 192]), 0.0, 1.0)

    Paper: Chen et al. 2026, arXiv:2603.05369.
    """

    factor: Tensor

    def __init__(self, dim: int, depth: int, index: int, warmup: float = SHARE) -> None:
        super().__init__()
        self.dim, self.depth, self.index, self.warmup = dim, depth, index, warmup
        self.register_buffer("factor", torch.ones(1), persistent=False)

    def reset_parameters(self) -> None:
        """The factor of a model that is not being trained."""
        self.factor.fill_(1.0)

    def factor_at(self, progress: float) -> float:
        """The factor at a share of the whole run."""
        return min(progress * self.depth / (self.warmup * (self.index + 1)), 1.0)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return in_dtype(x * self.factor, x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Nothing: the factor is one in inference."""
        return 0 * num_tokens


class Warmup:
    """Sets the factors of all ProRes modules of some models; does nothing where there are none.

    Args:
        models: The models; modules that share a factor are set once.
    """

    def __init__(self, *models: nn.Module) -> None:
        found = (module for model in models for module in model.modules())
        own = {id(m.factor): m for m in found if isinstance(m, ProgressiveResidual)}
        self.modules = list(own.values())
        self.done = not self.modules

    @torch.no_grad()
    def set(self, progress: float) -> None:
        """Set every factor to that of a share of the whole run, in two launches."""
        values = [module.factor_at(progress) for module in self.modules]
        finished = all(value == 1.0 for value in values)
        if self.done and finished:
            return
        factors = [module.factor for module in self.modules]
        torch._foreach_zero_(factors)
        torch._foreach_add_(factors, values)
        self.done = finished


def set_progress(model: nn.Module, progress: float) -> None:
    """Set the factors of a model's ProRes modules before an update of your own training loop.

    Args:
        model: The model.
        progress: Share of the whole run: updates done over all updates.

    >>> rule = ProgressiveResidual(192, depth=12, index=11)
    >>> set_progress(rule, progress=0.1)
    >>> rule(torch.ones(2, 197, 192))[0, 0, 0]
    tensor(0.5000)
    """
    if not 0 <= progress <= 1:
        raise ConfigError(
            f"set_progress: progress={progress} is not a share of the run; give updates done over all updates"
        )
    warmup = Warmup(model)
    if not warmup.modules:
        raise ConfigError(
            f"set_progress: {type(model).__name__} has no residual 'prores'; build it with that, or leave the call out"
        )
    warmup.set(progress)
