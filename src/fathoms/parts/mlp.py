"""The MLP branch: two linears with an activation between them."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from fathoms.ops.gelu import bias_gelu
from fathoms.parts.linears import PLAIN, Layers, linear_flops
from fathoms.parts.protocols import Branch
from fathoms.registry import Registry

MLPS: Registry[Branch, None] = Registry("mlp")


@MLPS.add("gelu")
class GeluMLP(nn.Module):
    """y = W2 gelu(W1 x), hidden width mlp_ratio * dim.

    >>> import torch
    >>> GeluMLP(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """

    def __init__(self, dim: int, mlp_ratio: float = 4.0, layers: Layers = PLAIN) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.fc1 = layers.linear(dim, hidden)
        self.act = layers.activation(nn.GELU())
        self.fc2 = layers.linear(hidden, dim)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return self.fc2(self.act(self.fc1(x)))

    def roles(self) -> list[tuple[str, Tensor]]:
        return [("hidden", self.fc1.weight.detach()), ("out", self.fc2.weight.detach())]

    def ends(self) -> tuple[list[nn.Module], nn.Module]:
        return [self.fc1], self.fc2

    def flop_count(self, num_tokens: int) -> int:
        """The linears, and two multiplications per hidden element for x * Phi(x / sqrt 2)."""
        curve = 2 * num_tokens * self.fc1.out_features
        return linear_flops(self.fc1, num_tokens) + curve + linear_flops(self.fc2, num_tokens)


class BiasedGelu(nn.Module):
    """gelu(x + bias), with the bias of the linear in front: its gradient then costs no pass of its own."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return bias_gelu(x, self.bias)


@MLPS.add("swiglu")
class SwiGLU(nn.Module):
    """y = W3 (silu(W1 x) * W2 x); W1 and W2 are packed, in this order, in `fc1`.

    The hidden width is two thirds of mlp_ratio * dim, rounded up to a multiple of 8, so that the MLP
    has as many weights as its GELU form.

    >>> import torch
    >>> SwiGLU(192)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, dim: int, mlp_ratio: float = 4.0, layers: Layers = PLAIN) -> None:
        super().__init__()
        self.hidden = -(-int(dim * mlp_ratio * 2 / 3) // 8) * 8
        self.fc1 = layers.linear(dim, 2 * self.hidden)
        self.act = layers.activation(nn.SiLU())
        self.fc2 = layers.linear(self.hidden, dim)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(self.act(gate) * value)

    def roles(self) -> list[tuple[str, Tensor]]:
        gate, value = self.fc1.weight.detach().chunk(2)
        return [("hidden", gate), ("hidden", value), ("out", self.fc2.weight.detach())]

    def ends(self) -> tuple[list[nn.Module], nn.Module]:
        return [self.fc1], self.fc2

    def flop_count(self, num_tokens: int) -> int:
        """The linears, and two multiplications per hidden element: x * sigmoid(x), and the gate."""
        gate = 2 * num_tokens * self.hidden
        return linear_flops(self.fc1, num_tokens) + gate + linear_flops(self.fc2, num_tokens)
