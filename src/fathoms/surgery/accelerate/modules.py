"""Faster replacements of attentions and MLPs, on the same parameters under the same names."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from fathoms.ops.class_attention import ClassAttentionImpl, class_attention
from fathoms.ops.dispatch import Impl
from fathoms.ops.mlp import gelu_mlp, why_not_fused
from fathoms.ops.talking_heads import talking_heads
from fathoms.parts.mlp import GeluMLP


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

    impl: ClassAttentionImpl = "auto"
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


class FusedMLP(InPlaceOf):
    """An MLP through `fathoms.ops.mlp.gelu_mlp` in inference, and through its own forward everywhere else.

    That is in training, where gradients are needed, for few tokens, and in dtypes that the kernel does not take.

    Args:
        old: A module with linears `fc1` and `fc2`, an exact GELU between them and, in inference, nothing else.
    """

    # What a ViT asks of its MLP; they read the two linears alone.
    roles, ends, flop_count = GeluMLP.roles, GeluMLP.ends, GeluMLP.flop_count
    impl: Impl = "auto"
    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(self, old: nn.Module) -> None:
        super().__init__(old)
        self._plain_forward = type(old).forward

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """V gelu(W x + b) + c."""
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        plain = self.impl == "reference" or (self.impl == "auto" and why_not_fused(x, *weights) is not None)
        if self.training or plain:
            return self._plain_forward(self, x)
        return gelu_mlp(x, *weights, impl="triton")
