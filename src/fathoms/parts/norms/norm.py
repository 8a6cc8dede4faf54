"""Norms with per-token statistics; statistics-free replacements are in `scaler` and `dyt`.

Every norm takes any channels-last tensor, computes in float32 or better and returns the dtype of its input, so
that a bfloat16 stream under float32 weights is rounded once.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.names.registry import Registry
from fathoms.ops.autocast import is_on
from fathoms.parts.protocols import Part

NORMS: Registry[Part, None] = Registry("norm")


def _widest(x: Tensor, weight: Tensor | None) -> Tensor:
    """`x` in the wider of its own and the weight's dtype; without a weight or under autocast in float32 or better.

    CUDA's autocast has always run layer_norm in float32, but rms_norm only since torch 2.12. Widened here, both have
    the same dtype and numbers under every version.
    """
    least = torch.float32 if weight is None or is_on(x) else x.dtype
    both = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    return x.to(torch.promote_types(both, least))


def split_affine(
    norm: nn.Module, names: tuple[str | None, str | None] | None = None
) -> tuple[nn.Module, Tensor | None, Tensor | None]:
    """A norm in parts: y = gain * rest(x) + shift. The norm itself stays as it is.

    Args:
        norm: Any norm.
        names: Its parameters for gain and shift. None reads them from the norm's `affine_names`; a norm without
            those is all rest, for only its author knows what it does with its parameters.
    """
    rest = copy.copy(norm)
    rest._parameters = dict(norm._parameters)
    names = names or getattr(norm, "affine_names", (None, None))
    gain, shift = (None if name is None else getattr(norm, name) for name in names)
    for name in names:
        if name is not None:
            rest.register_parameter(name, None)
    if hasattr(rest, "elementwise_affine"):
        # torch's norms reset and print their parameters by this flag.
        rest.elementwise_affine = any(own is not None for own in rest._parameters.values())  # pyrefly: ignore
    return rest, gain, shift


@NORMS.add("layernorm")
class LayerNorm(nn.LayerNorm):
    """Centre and scale each token: y = weight * (x - mean) / sqrt(var + eps) + bias.

    A torch LayerNorm whose `eps` is the 1e-6 of Vision Transformers and whose output has the dtype of
    its input, also under autocast.

    >>> LayerNorm(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Ba et al. 2016, arXiv:1607.06450.
    """

    affine_names = ("weight", "bias")

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalise over the last axis."""
        wide = _widest(x, self.weight)
        own: list[Tensor | None] = [self.weight, self.bias]
        weight, bias = (None if part is None else part.to(wide.dtype) for part in own)
        return F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Three multiplications per element: the square, the scale, and the weight where there is one."""
        return (2 if self.weight is None else 3) * num_tokens * self.normalized_shape[0]


@NORMS.add("rmsnorm")
class RMSNorm(nn.RMSNorm):
    """Scale each token to unit root mean square: y = weight * x / sqrt(mean(x²) + eps).

    >>> RMSNorm(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    affine_names = ("weight", None)

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalise over the last axis."""
        own: Tensor | None = self.weight
        wide = _widest(x, own)
        weight = None if own is None else own.to(wide.dtype)
        return F.rms_norm(wide, self.normalized_shape, weight, self.eps).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Three multiplications per element: the square, the scale, and the weight where there is one."""
        return (2 if self.weight is None else 3) * num_tokens * self.normalized_shape[0]


@NORMS.add("scalenorm")
class ScaleNorm(nn.Module):
    """Give every token the same learned length: y = g * x / |x|, g initialised to sqrt(dim).

    Tokens shorter than `eps` are divided by `eps`. It is large enough that the gradient at a token of
    zeros, g / eps, stays a float16 number.

    >>> ScaleNorm(4)(torch.tensor([[3.0, 0.0, 4.0, 0.0]])).detach()
    tensor([[1.2000, 0.0000, 1.6000, 0.0000]])

    Paper: Nguyen & Salazar 2019, arXiv:1910.05895.
    """

    affine_names = ("g", None)

    def __init__(self, dim: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        # One element, not zero-dimensional: sharded training (FSDP2) takes no scalars.
        self.g = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at g = sqrt(dim), the length of a token whose elements have unit variance."""
        nn.init.constant_(self.g, math.sqrt(self.dim))

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Rescale each token."""
        own: Tensor | None = self.g
        unit = F.normalize(_widest(x, own), dim=-1, eps=self.eps)
        return (unit if own is None else unit * own).to(x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Three multiplications per element: the square, the division by the length, and g where there is one."""
        return (2 if self.g is None else 3) * num_tokens * self.dim


@NORMS.add("none")
class NoNorm(nn.Module):
    """No norm: y = x.

    >>> NoNorm(192)(torch.ones(2, 197, 192)).shape
    torch.Size([2, 197, 192])
    """

    affine_names = (None, None)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Return x."""
        return x

    def flop_count(self, num_tokens: int) -> int:
        """Nothing is multiplied."""
        return 0 * num_tokens
