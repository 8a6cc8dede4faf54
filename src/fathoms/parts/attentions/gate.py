"""Gates on the output of an attention, before its last projection."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from fathoms.names.registry import Registry
from fathoms.parts.linear import linear_flops
from fathoms.parts.protocols import Gate
from fathoms.parts.residuals.fixup_layers import PLAIN, Layers

GATES: Registry[Gate, None] = Registry("attn_gate")


@GATES.add("none")
class NoGate(nn.Module):
    """The heads' output as it is."""

    def __init__(self, dim: int, heads: int, layers: Layers = PLAIN) -> None:
        super().__init__()
        del layers
        self.dim, self.heads = dim, heads

    def forward(self, out: Float[Tensor, "B N D"], x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return `out`."""
        del x
        return out

    def linears(self) -> list[nn.Linear]:
        """None."""
        return []

    def flop_count(self, num_tokens: int) -> int:
        """Nothing is multiplied."""
        return 0 * num_tokens


@GATES.add("channel")
class ChannelGate(nn.Module):
    """y = sigmoid(G x) * heads' output, one gate for each channel; x is the attention's input.

    G has no bias and starts like the other matrices of the attention, so that gates start near 1/2.

    >>> import torch
    >>> ChannelGate(192, heads=3)(torch.randn(2, 197, 192), torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Qiu et al. 2025, arXiv:2505.06708.
    """

    def __init__(self, dim: int, heads: int, layers: Layers = PLAIN) -> None:
        super().__init__()
        self.dim, self.gates = dim, self.count(dim, heads)
        self.proj = layers.linear(dim, self.gates, bias=False)

    @staticmethod
    def count(dim: int, heads: int) -> int:
        """Number of gates of a token."""
        del heads
        return dim

    def forward(self, out: Float[Tensor, "B N D"], x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Open or shut each channel of `out`, by x."""
        gate = self.proj(x).sigmoid().unsqueeze(-1)
        return (out.unflatten(-1, (self.gates, -1)) * gate).flatten(-2).to(out.dtype)

    def linears(self) -> list[nn.Linear]:
        """The linear that reads the attention's input."""
        return [self.proj]

    def flop_count(self, num_tokens: int) -> int:
        """The linear, and one multiplication per element."""
        return linear_flops(self.proj, num_tokens) + num_tokens * self.dim


@GATES.add("head")
class HeadGate(ChannelGate):
    """y = sigmoid(G x) * heads' output, one gate for each head; x is the attention's input.

    >>> import torch
    >>> HeadGate(192, heads=3)(torch.randn(2, 197, 192), torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Qiu et al. 2025, arXiv:2505.06708.
    """

    @staticmethod
    def count(dim: int, heads: int) -> int:
        """Number of gates of a token."""
        del dim
        return heads
