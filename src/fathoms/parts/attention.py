"""Attention: softmax, talking heads, class attention for the read-out, and gates on an attention's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import BackendError
from fathoms.ops.attention_ops import ClassAttentionImpl, attend, class_attention, mix_heads, talking_heads
from fathoms.ops.dispatch import in_dtype, wide
from fathoms.parts.linears import PLAIN, STD, Layers, is_bare, linear_flops
from fathoms.parts.norms import NORMS, NoNorm
from fathoms.parts.protocols import Branch, Gate
from fathoms.parts.rope import Rotation, head_width, merge_heads, rotate, split_heads
from fathoms.registry import Registry

GATES: Registry[Gate, None] = Registry("attn_gate")


@GATES.add("none")
class NoGate(nn.Module):
    """The heads' output as it is."""

    def __init__(self, dim: int, heads: int, layers: Layers = PLAIN) -> None:
        super().__init__()
        del layers
        self.dim, self.heads = dim, heads

    def forward(self, out: Float[Tensor, "B N D"], x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        del x
        return out

    def linears(self) -> list[nn.Module]:
        return []

    def flop_count(self, num_tokens: int) -> int:
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
        del heads
        return dim

    def forward(self, out: Float[Tensor, "B N D"], x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Open or shut each channel of `out`, by x."""
        gate = self.proj(x).sigmoid().unsqueeze(-1)
        return in_dtype((out.unflatten(-1, (self.gates, -1)) * gate).flatten(-2), out.dtype)

    def linears(self) -> list[nn.Module]:
        """The linear that reads the attention's input."""
        return [self.proj]

    def flop_count(self, num_tokens: int) -> int:
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
        del dim
        return heads


@dataclass(frozen=True)
class Traits:
    """Properties of an attention that the model builder reads.

    Args:
        reads_context: Whether it takes a context besides its queries, and so works in a read-out only.
    """

    reads_context: bool = False


ATTENTIONS: Registry[Branch, Traits] = Registry("attention", default=Traits())


def _mixed(maps: Float[Tensor, "B H N M"], mixer: nn.Module) -> Float[Tensor, "B H N M"]:
    """Maps mixed across the heads, in their dtype."""
    if is_bare(mixer):
        linear = cast(nn.Linear, mixer)
        return mix_heads(maps, linear.weight, linear.bias)
    own = next(mixer.parameters(), maps)
    return in_dtype(mixer(in_dtype(maps.movedim(1, -1), own.dtype)).movedim(-1, 1), maps.dtype)


def _attend_flops(queries: int, keys: int, dim: int, heads: int) -> int:
    """Scaling the queries, q·k, the softmax's division, and the product with the values."""
    return queries * dim + queries * keys * dim + heads * queries * keys + queries * keys * dim


@ATTENTIONS.add("softmax")
class SelfAttention(nn.Module):
    """softmax(q kᵀ / sqrt K) v per head, through torch's fused attention.

    Args:
        dim: Width of a token.
        heads: Number of heads; must divide `dim`.
        qkv_bias: Whether the packed q, k, v projection has a bias.
        qk_norm: The norm on each head's q and k, one for all heads, before any rotation.
        layers: Factory of the linears.
        gate: The gate on the heads' output.

    >>> SelfAttention(192, heads=3)(torch.randn(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Vaswani et al. 2017, arXiv:1706.03762.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        qkv_bias: bool = True,
        qk_norm: str = "none",
        layers: Layers = PLAIN,
        gate: str = "none",
    ) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        width = head_width(dim, heads)
        self.qkv = layers.linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = NORMS.build(qk_norm, width)
        self.k_norm = NORMS.build(qk_norm, width)
        self.proj = layers.linear(dim, dim)
        self.gate = GATES.build(gate, dim, heads, layers)

    def project(self, x: Float[Tensor, "B N D"], rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """The heads' q, k and v, normalised and rotated."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def mix_logits(self, logits: Float[Tensor, "B H N N"]) -> Float[Tensor, "B H N N"]:
        """What the softmax takes, from the scaled products of q and k."""
        return logits

    def probabilities(
        self, q: Float[Tensor, "B H N K"], k: Float[Tensor, "B H N K"]
    ) -> Float[Tensor, "B H N N"]:
        """The map that the fused attention does not show, from what `project` gives, in float32 or better."""
        logits = self.mix_logits(q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1))
        return logits.softmax(-1, dtype=wide(logits.dtype))

    def weights(self, probs: Float[Tensor, "B H N N"]) -> Float[Tensor, "B H N N"]:
        """The factors of the values, from the probabilities."""
        return probs

    def forward(self, x: Float[Tensor, "B N D"], rotation: Rotation | None = None) -> Float[Tensor, "B N D"]:
        """Attention of every token to every token."""
        q, k, v = self.project(x, rotation)
        return self.leave(attend(q, k, v), x)

    def leave(self, out: Float[Tensor, "B H N K"], x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """The attention's output, from that of its heads and its input x: gate and projection."""
        return self.proj(self.gate(merge_heads(out), x))

    def roles(self) -> list[tuple[str, Tensor]]:
        q, k, v = self.qkv.weight.detach().chunk(3)
        gates = [("gate", cast(nn.Linear, linear).weight.detach()) for linear in self.gate.linears()]
        return [("q", q), ("k", k), ("v", v), *gates, ("out", self.proj.weight.detach())]

    def ends(self) -> tuple[list[nn.Module], nn.Module]:
        return [self.qkv, *self.gate.linears()], self.proj

    def flop_count(self, num_tokens: int) -> int:
        around = 2 * self.q_norm.flop_count(num_tokens * self.heads) + self.gate.flop_count(num_tokens)
        attend = _attend_flops(num_tokens, num_tokens, self.dim, self.heads)
        return linear_flops(self.qkv, num_tokens) + around + attend + linear_flops(self.proj, num_tokens)


@ATTENTIONS.add("talking_heads")
class TalkingHeadsAttention(SelfAttention):
    """Attention whose heads are mixed by a learned matrix before the softmax and by another after it.

    `proj_l` mixes the logits, `proj_w` the probabilities, whose rows then need not sum to one. The bias
    of `proj_l` adds the same number to a whole row, so the softmax cancels it: it is there because the
    published weights have it, and its gradient is zero. Both are called where they are more than plain linears.

    >>> TalkingHeadsAttention(192, heads=4)(torch.randn(2, 196, 192)).shape
    torch.Size([2, 196, 192])

    Paper: Shazeer et al. 2020, arXiv:2003.02436.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        qkv_bias: bool = True,
        qk_norm: str = "none",
        layers: Layers = PLAIN,
        gate: str = "none",
    ) -> None:
        super().__init__(dim, heads, qkv_bias, qk_norm, layers, gate)
        self.proj_l = nn.Linear(heads, heads)
        self.proj_w = nn.Linear(heads, heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for mixer in (self.proj_l, self.proj_w):
            nn.init.trunc_normal_(mixer.weight, std=STD)
            nn.init.zeros_(mixer.bias)

    def mix_logits(self, logits: Float[Tensor, "B H N N"]) -> Float[Tensor, "B H N N"]:
        """The scaled products mixed by `proj_l`."""
        return _mixed(logits, self.proj_l)

    def weights(self, probs: Float[Tensor, "B H N N"]) -> Float[Tensor, "B H N N"]:
        """The probabilities mixed by `proj_w`."""
        return _mixed(probs, self.proj_w)

    def forward(self, x: Float[Tensor, "B N D"], rotation: Rotation | None = None) -> Float[Tensor, "B N D"]:
        """Attention of every token to every token, with mixed heads."""
        q, k, v = self.project(x, rotation)
        if not (is_bare(self.proj_l) and is_bare(self.proj_w)):
            probs = in_dtype(self.probabilities(q, k), v.dtype)
            return self.leave(in_dtype(self.weights(probs) @ v, v.dtype), x)
        mixers = self.proj_l.weight, self.proj_l.bias, self.proj_w.weight, self.proj_w.bias
        return self.leave(talking_heads(q, k, v, *mixers, scale=(self.dim // self.heads) ** -0.5), x)

    def flop_count(self, num_tokens: int) -> int:
        """Plain attention, and heads² multiplications per pair of tokens for each of the two mixings."""
        return super().flop_count(num_tokens) + 2 * self.heads**2 * num_tokens**2


@ATTENTIONS.add("class_attention", Traits(reads_context=True))
class ClassAttention(nn.Module):
    """A few query tokens read all tokens: q from the queries, k and v from queries and context.

    The context is read and never written. Where queries are few, its keys and values are never made: `impl` is
    that of `fathoms.ops.attention_ops`. They are made where each key is normed, and where `k` or `v` is more than
    a plain linear or has hooks.

    >>> attention = ClassAttention(192, heads=4)
    >>> attention(torch.randn(2, 1, 192), torch.randn(2, 196, 192)).shape
    torch.Size([2, 1, 192])

    Paper: Touvron et al. 2021, arXiv:2103.17239.
    """

    impl: ClassAttentionImpl = "auto"

    def __init__(
        self, dim: int, heads: int, qkv_bias: bool = True, qk_norm: str = "none", layers: Layers = PLAIN
    ) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        width = head_width(dim, heads)
        self.q = layers.linear(dim, dim, bias=qkv_bias)
        self.k = layers.linear(dim, dim, bias=qkv_bias)
        self.v = layers.linear(dim, dim, bias=qkv_bias)
        self.q_norm = NORMS.build(qk_norm, width)
        self.k_norm = NORMS.build(qk_norm, width)
        self.proj = layers.linear(dim, dim)

    def forward(
        self, queries: Float[Tensor, "B Q D"], context: Float[Tensor, "B N D"]
    ) -> Float[Tensor, "B Q D"]:
        """Attention of each query to the queries and the context."""
        reason = self._why_not_absorbed()
        if reason is None:
            q = self._project_queries(queries)
            weights = self.k.weight, self.k.bias, self.v.weight, self.v.bias
            out = class_attention(q, queries, context, *weights, impl=self.impl)
        elif self.impl == "absorbed":
            raise BackendError(f'class_attention: impl="absorbed" cannot run: {reason}; use impl="auto"')
        else:
            q, k = self.project(queries, context)
            v = torch.cat([self.v(queries), self.v(context)], dim=1)
            out = attend(q, k, split_heads(v, self.heads))
        return self.proj(merge_heads(out))

    def project(
        self, queries: Float[Tensor, "B Q D"], context: Float[Tensor, "B N D"]
    ) -> tuple[Tensor, Tensor]:
        """The heads' q, and their k of queries and context, normalised."""
        q = self._project_queries(queries)
        k = torch.cat([self.k(queries), self.k(context)], dim=1)
        return q, self.k_norm(split_heads(k, self.heads))

    def _project_queries(self, queries: Float[Tensor, "B Q D"]) -> Float[Tensor, "B H Q K"]:
        return self.q_norm(split_heads(self.q(queries), self.heads))

    def _why_not_absorbed(self) -> str | None:
        if not isinstance(self.k_norm, NoNorm):
            return "each key is normed"
        return (
            None if is_bare(self.k) and is_bare(self.v) else "k or v is more than a plain linear or has hooks"
        )

    def roles(self) -> list[tuple[str, Tensor]]:
        linears = {"q": self.q, "k": self.k, "v": self.v, "out": self.proj}
        return [(role, linear.weight.detach()) for role, linear in linears.items()]

    def ends(self) -> tuple[list[nn.Module], nn.Module]:
        return [self.q, self.k, self.v], self.proj

    def flop_count(self, num_tokens: int, num_queries: int = 1) -> int:
        """Multiplications with `num_queries` queries over a context of `num_tokens` tokens.

        Keys and values are counted, as in papers, also where `impl` avoids computing them.
        """
        keys = num_queries + num_tokens
        norms = self.heads * (num_queries + keys)
        return (
            linear_flops(self.q, num_queries)
            + linear_flops(self.k, keys)
            + linear_flops(self.v, keys)
            + self.q_norm.flop_count(norms)
            + _attend_flops(num_queries, keys, self.dim, self.heads)
            + linear_flops(self.proj, num_queries)
        )
