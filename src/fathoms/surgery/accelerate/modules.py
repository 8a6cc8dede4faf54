"""Attentions and blocks as others wrote them, on the same parameters under the same names, but faster."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from fathoms.ops.class_attention import Form, class_attention
from fathoms.ops.scale_add import scale_add
from fathoms.ops.talking_heads import talking_heads


class InPlaceOf(nn.Module):
    """The old module in all but its forward: the same parameters, modules, hooks and flags."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(old.__dict__)


class FusedTalkingHeads(InPlaceOf):
    """timm's and DeiT's talking-heads attention through `fathoms.ops.talking_heads`.

    Args:
        old: A module with `qkv`, `proj`, `proj_l`, `proj_w`, `num_heads` and `scale`.
    """

    num_heads: int
    scale: float
    qkv: nn.Linear
    proj: nn.Linear
    proj_l: nn.Linear
    proj_w: nn.Linear
    proj_drop: nn.Module

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Attention over all tokens whose heads are mixed before and after the softmax."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixers = self.proj_l.weight, self.proj_l.bias, self.proj_w.weight, self.proj_w.bias
        out = talking_heads(q, k, v, *mixers, scale=self.scale)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class OneQueryAttention(InPlaceOf):
    """timm's and DeiT's class attention through `fathoms.ops.class_attention`, without computing keys and values.

    With attention dropout in training the reference formula is used: dropped probabilities do not sum to one.

    Args:
        old: A module with `q`, `k`, `v`, `proj`, `num_heads` and `scale`, whose query is the first token.
    """

    impl: Form = "auto"
    num_heads: int
    scale: float
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    proj: nn.Linear
    attn_drop: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B 1 D"]:
        """Attention of the first token over all tokens."""
        q = self.q(x[:, :1]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.training and getattr(self.attn_drop, "p", 0.0) > 0.0:
            out = self._dropped(q * self.scale, x)
        else:
            weights = self.k.weight, self.k.bias, self.v.weight, self.v.bias
            # The operation divides by sqrt K; the module may have another scale.
            factor = self.scale * q.shape[-1] ** 0.5
            out = class_attention(q if factor == 1.0 else q * factor, None, x, *weights, impl=self.impl)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def _dropped(self, q: Tensor, x: Tensor) -> Tensor:
        key, value = (
            layer.weight.unflatten(0, (self.num_heads, -1)).to(q.dtype) for layer in (self.k, self.v)
        )
        tokens = x.to(q.dtype)[:, None]
        logits = q @ key @ tokens.mT
        if self.k.bias is not None:
            logits = logits + q @ self.k.bias.unflatten(0, (self.num_heads, -1, 1)).to(q.dtype)
        probs = self.attn_drop(logits.softmax(-1).to(q.dtype))
        out = probs @ tokens @ value.mT
        if self.v.bias is None:
            return out
        return out + probs.sum(-1, keepdim=True) * self.v.bias.unflatten(0, (self.num_heads, 1, -1)).to(
            q.dtype
        )


class OnePassBlock(InPlaceOf):
    """A block with LayerScale that adds each branch to the stream in one pass: x + gamma * branch.

    A dropped path is scaled after it is dropped and not before, which is the same product.

    Args:
        old: A pre-norm block with `norm1`, `attn`, `norm2`, `mlp`, and its scales as `gamma_1` and `gamma_2` (CaiT,
            BEiT, EVA) or as `ls1` and `ls2` (ViT, DeiT-III, DINOv2).
    """

    norm1: nn.Module
    attn: nn.Module
    norm2: nn.Module
    mlp: nn.Module

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
