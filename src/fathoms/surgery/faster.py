"""Attentions and blocks as others wrote them, on the same parameters under the same names, but faster."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.ops.scale_add import scale_add
from fathoms.ops.talking_heads import talking_heads


class FusedTalkingHeads(nn.Module):
    """timm's and DeiT's talking-heads attention through `fathoms.ops.talking_heads`.

    Args:
        old: A module with `qkv`, `proj`, `proj_l`, `proj_w`, `num_heads` and `scale`.
    """

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.num_heads, self.scale = old.num_heads, old.scale
        self.qkv, self.proj = old.qkv, old.proj
        self.proj_l, self.proj_w = old.proj_l, old.proj_w
        self.attn_drop, self.proj_drop = old.attn_drop, old.proj_drop

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Let every token look at every token, with heads that confer."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixers = self.proj_l.weight, self.proj_l.bias, self.proj_w.weight, self.proj_w.bias
        out = talking_heads(q, k, v, *mixers, scale=self.scale)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class OneQueryAttention(nn.Module):
    """timm's and DeiT's class attention with its key and value projections moved to the one query.

    With a single query, q·(W_k x + b_k) = (W_kᵀ q)·x + q·b_k, and the values' projection leaves the sum over
    tokens. Nothing of size N D² is left: two N D² become 2 N D H, and the keys and values are never stored.

    Args:
        old: A module with `q`, `k`, `v`, `proj`, `num_heads` and `scale`, whose query is the first token.
    """

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.num_heads, self.scale = old.num_heads, old.scale
        self.q, self.k, self.v, self.proj = old.q, old.k, old.v, old.proj
        self.attn_drop, self.proj_drop = old.attn_drop, old.proj_drop

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B 1 D"]:
        """What the first token gathers from all tokens."""
        heads = self.num_heads
        q = self.q(x[:, 0]).unflatten(-1, (heads, -1)) * self.scale
        key = self.k.weight.unflatten(0, (heads, -1)).to(q.dtype)
        value = self.v.weight.unflatten(0, (heads, -1)).to(q.dtype)
        tokens = x.to(q.dtype)
        logits = torch.einsum("bhk,hkd->bhd", q, key) @ tokens.transpose(1, 2)
        if self.k.bias is not None:
            logits = logits + (q * self.k.bias.unflatten(0, (heads, -1)).to(q.dtype)).sum(-1, keepdim=True)
        probs = self.attn_drop(logits.softmax(-1).to(q.dtype))
        out = torch.einsum("bhd,hkd->bhk", probs @ tokens, value)
        if self.v.bias is not None:
            # Dropped probabilities no longer sum to one, so their sum weighs the bias.
            out = out + probs.sum(-1, keepdim=True) * self.v.bias.unflatten(0, (heads, -1)).to(q.dtype)
        return self.proj_drop(self.proj(out.flatten(1)[:, None]))


class OnePassBlock(nn.Module):
    """A block with LayerScale that adds each branch to the stream in one pass: x + gamma * branch.

    It is the old block in all but its forward: the same parameters, modules, hooks and flags. A dropped path is
    scaled after it is dropped and not before, which is the same product.

    Args:
        old: A pre-norm block with `norm1`, `attn`, `norm2`, `mlp`, and its scales as `gamma_1` and `gamma_2` (CaiT,
            BEiT, EVA) or as `ls1` and `ls2` (ViT, DeiT-III, DINOv2).
    """

    norm1: nn.Module
    attn: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(old.__dict__)

    def forward(self, x: Float[Tensor, "B N D"], **context: Any) -> Float[Tensor, "B N D"]:
        """Attention, then MLP; what else the block is given, such as a mask, goes to the attention."""
        x = self._join(1, x, self.attn(self.norm1(x), **context))
        return self._join(2, x, self.mlp(self.norm2(x)))

    def _join(self, place: int, x: Tensor, branch: Tensor) -> Tensor:
        own = f"drop_path{place}"
        drop: Any = getattr(self, own if hasattr(self, own) else "drop_path")
        gamma = scale_of(self, place)
        return x + drop(branch) if gamma is None else scale_add(x, gamma, drop(branch))


def scale_of(block: nn.Module, place: int) -> Tensor | None:
    """The LayerScale of a block's first or second branch, as CaiT or as ViT keeps it; None if it has none."""
    owner = getattr(block, f"ls{place}", None)
    gamma = getattr(block, f"gamma_{place}", None) if owner is None else getattr(owner, "gamma", None)
    return gamma if isinstance(gamma, Tensor) else None
