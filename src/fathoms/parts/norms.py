"""Norms, and what stands in for one: LearnableScaler, DyT and Derf have no statistics.

Every norm takes any channels-last tensor, computes in float32 or better and returns the dtype of its input, so
that a bfloat16 stream under float32 weights is rounded once. Each but "none" takes torch's `device` and
`dtype`, so that it stands in where a library builds its norms with those, as timm does with `norm_layer=`.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, fx, nn

from fathoms.errors import ConfigError
from fathoms.ops.dispatch import in_dtype, is_on, wide
from fathoms.parts.protocols import Part
from fathoms.registry import Registry, check_name

NORMS: Registry[Part, None] = Registry("norm")


def _widest(x: Tensor, weight: Tensor | None) -> Tensor:
    """`x` in the wider of its own and the weight's dtype; without a weight or under autocast in float32 or better.

    CUDA's autocast has always run layer_norm in float32, but rms_norm only since torch 2.12. Widened here, both have
    the same dtype and numbers under every version.
    """
    widest = wide(x.dtype) if weight is None or is_on(x) else x.dtype
    if weight is not None and weight.dtype != widest:
        widest = torch.promote_types(widest, weight.dtype)
    return in_dtype(x, widest)


def _on_maps(value: Tensor, x: Tensor) -> Tensor:
    """One number of each channel in the shape that multiplies maps."""
    return value.view(-1, *[1] * (x.ndim - 2))


# They look at their inputs, which a symbolic trace has none of: torch.fx calls them whole.
fx.wrap("_widest")
fx.wrap("in_dtype")
fx.wrap("_on_maps")


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

    def __init__(
        self, dim: int, eps: float = 1e-6, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        exact = _widest(x, self.weight)
        own: list[Tensor | None] = [self.weight, self.bias]
        weight, bias = (None if part is None else in_dtype(part, exact.dtype) for part in own)
        return in_dtype(F.layer_norm(exact, self.normalized_shape, weight, bias, self.eps), x.dtype)

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

    def __init__(
        self, dim: int, eps: float = 1e-6, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        own: Tensor | None = self.weight
        exact = _widest(x, own)
        weight = None if own is None else in_dtype(own, exact.dtype)
        if torch.jit.is_tracing():
            # torch's older ONNX exporter does not know rms_norm.
            unit = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + cast(float, self.eps))
            return in_dtype(unit if weight is None else unit * weight, x.dtype)
        return in_dtype(F.rms_norm(exact, self.normalized_shape, weight, self.eps), x.dtype)

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

    def __init__(
        self, dim: int, eps: float = 1e-3, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        # One element, not zero-dimensional: sharded training (FSDP2) takes no scalars.
        self.g = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at g = sqrt(dim), the length of a token whose elements have unit variance."""
        nn.init.constant_(self.g, math.sqrt(self.dim))

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        own: Tensor | None = self.g
        unit = F.normalize(_widest(x, own), dim=-1, eps=self.eps)
        return in_dtype(unit if own is None else unit * own, x.dtype)

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
        return x

    def flop_count(self, num_tokens: int) -> int:
        return 0 * num_tokens


ScalerInit = Literal["normal", "ones"]


@NORMS.add("learnable_scaler")
class LearnableScaler(nn.Module):
    """A learned affine map in place of a norm: y[..., c] = a[c] * x[..., c] + b[c], without statistics.

    Nothing bounds the stream, so its authors train with 0.6 to 0.8 of LayerNorm's learning rate (0.003 to 0.004 for
    0.005), for long, and report gains in deep networks. It folds into the linear behind it. For CNNs and BatchNorm
    there is `LearnableScaler2d`.

    Args:
        num_channels: Length of `a` and `b`.
        eps: Accepted for LayerNorm's signature and not used.
        affine: Accepted for the authors' signature, where it is not used; False is refused, `nn.Identity()` is that.
        init: "normal" draws a from N(0, 1), as the authors' code does; "ones" starts at the identity.
        device: Of the parameters, as in torch's own layers.
        dtype: Of the parameters.

    >>> LearnableScaler(192, init="ones")(torch.ones(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    From: github.com/nghiemtuan/LearnableScaler; with init="ones" it is ResMLP's Affine, arXiv:2105.03404.
    """

    affine_names = ("a", "b")

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        affine: bool = True,
        init: ScalerInit = "normal",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not affine:
            raise ConfigError(
                f"{type(self).__name__}: affine=False leaves nothing to learn; use nn.Identity()"
            )
        self.num_channels, self.eps = num_channels, eps
        self.init = check_name(init, ("normal", "ones"), "init", type(self).__name__)
        self.a = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.b = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.a) if self.init == "normal" else nn.init.ones_(self.a)
        nn.init.zeros_(self.b)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        if self.a is None or self.b is None:
            return x
        return in_dtype(x * self.a + self.b, x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """One multiplication per element; for maps, `num_tokens` is the number of positions."""
        return 0 if self.a is None else num_tokens * self.num_channels


class LearnableScaler2d(LearnableScaler):
    """LearnableScaler for maps (B, C, ...) of any number of axes, in place of a BatchNorm.

    >>> LearnableScaler2d(64)(torch.randn(2, 64, 8, 8)).shape
    torch.Size([2, 64, 8, 8])

    From: github.com/nghiemtuan/LearnableScaler.
    """

    def forward(self, x: Float[Tensor, "B C *map"]) -> Float[Tensor, "B C *map"]:
        if self.a is None or self.b is None:
            return x
        return in_dtype(x * _on_maps(self.a, x) + _on_maps(self.b, x), x.dtype)


def _check_alpha(part: str, init: float) -> float:
    if isinstance(init, str):
        raise ConfigError(f"{part}: init={init!r} is not a number; give the initial alpha, for example 0.5")
    return float(init)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift; a norm whose affine parameters were folded away has neither."""
    return x if weight is None or bias is None else x * weight + bias


@NORMS.add("dyt")
class DyT(nn.Module):
    """Dynamic tanh: y = weight * tanh(alpha * x) + bias, one alpha for all channels.

    Args:
        dim: Number of channels.
        init: Initial alpha.

    >>> DyT(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Zhu et al. 2025, arXiv:2503.10622.
    """

    affine_names = ("weight", "bias")

    def __init__(
        self, dim: int, init: float = 0.5, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.dim, self.init = dim, _check_alpha("dyt", init)
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.init)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return in_dtype(_affine(torch.tanh(x * self.alpha), self.weight, self.bias), x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Two multiplications per element: alpha, and the weight where there is one."""
        return (1 if self.weight is None else 2) * num_tokens * self.dim


@NORMS.add("derf")
class Derf(nn.Module):
    """Dynamic erf: y = weight * erf(alpha * x + shift) + bias, alpha and shift for all channels.

    Args:
        dim: Number of channels.
        init: Initial alpha; the shift starts at zero.

    >>> Derf(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Chen et al. 2025, "Stronger Normalization-Free Transformers", arXiv:2512.10938.
    """

    affine_names = ("weight", "bias")

    def __init__(
        self, dim: int, init: float = 0.5, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.dim, self.init = dim, _check_alpha("derf", init)
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.init)
        nn.init.zeros_(self.shift)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return in_dtype(_affine(torch.erf(x * self.alpha + self.shift), self.weight, self.bias), x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """Two multiplications per element: alpha, and the weight where there is one."""
        return (1 if self.weight is None else 2) * num_tokens * self.dim
