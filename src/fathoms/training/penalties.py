"""LearnableScaler's penalties: feature decay on the residual stream, and attention sharpening in the first blocks.

Without statistics in its norms a deep model can let features grow and attention stay flat; each penalty is zero
where that does not happen.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.models.vit import ViT
from fathoms.ops.dispatch import widened
from fathoms.parts.attention import SelfAttention
from fathoms.parts.block import Block
from fathoms.parts.rope import Rotation

FEATURE_LIMIT = 200.0
SHARP = 0.5


def feature_penalty(x: Float[Tensor, "*any"]) -> Float[Tensor, ""]:
    """Feature penalty: mean plus maximum of |x| - 200 over the elements beyond 200, or zero if there is none.

    >>> feature_penalty(torch.tensor([1.0, -202.0, 204.0])).item()
    7.0
    """
    excess = (widened(x).abs() - FEATURE_LIMIT).relu()
    beyond = (excess > 0).sum()
    return excess.sum() / beyond.clamp(min=1) + excess.amax()


def attention_penalty(maxima: Float[Tensor, "B H N"]) -> Float[Tensor, ""]:
    """Attention penalty: one minus the mean of the row maxima below 0.5, or zero if there is none.

    >>> attention_penalty(torch.tensor([[[0.9, 0.2, 0.4]]])).item()
    0.699999988079071
    """
    maxima = widened(maxima)
    flat = maxima < SHARP
    count = flat.sum()
    mean = torch.where(flat, maxima, 0.0).sum() / count.clamp(min=1)
    return torch.where(count > 0, 1 - mean, 0.0)


def effective_weights(feature_decay: float, attn_loss: float) -> tuple[float, float]:
    """Weights of the two penalties in the loss, from the flags of LearnableScaler's command.

    The original scales everything by the feature decay s once more: s² for the features and s * s_a for the
    attention. Its attention penalty cannot run without feature decay; here its weight is then s_a.

    >>> effective_weights(0.5, 0.25), effective_weights(0.0, 0.25)
    ((0.25, 0.125), (0.0, 0.25))
    """
    return feature_decay**2, attn_loss * (feature_decay or 1.0)


class WithPenalties(nn.Module):
    """A ViT whose forward pass also returns the penalties: `heads, penalty = model(images)`.

    `heads` is the tuple of `ViT.forward_heads`, `penalty` a weighted scalar to add to the loss. Blocks without the
    attention penalty run their fused attention. The penalties apply to `vit.blocks`; class-attention blocks, which
    write no patch, have none. DDP and torch.compile wrap this module; weights are saved from `vit`, which shares
    them.

    Args:
        vit: The model.
        feature_decay: s, as --train-feature-decay; zero turns the penalty off.
        attn_loss: s_a, as --attn-extra-loss; zero turns the penalty off.
        attn_layers: Number of first blocks with the attention penalty; all, if there are fewer.

    >>> from fathoms import ViTConfig
    >>> vit = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, heads=4, depth=2, num_classes=10))
    >>> heads, penalty = WithPenalties(vit, 0.1, 0.03, attn_layers=1)(torch.randn(5, 3, 32, 32))
    >>> heads[0].shape, penalty.shape
    (torch.Size([5, 10]), torch.Size([]))
    """

    def __init__(
        self, vit: ViT, feature_decay: float = 0.0, attn_loss: float = 0.0, attn_layers: int = 0
    ) -> None:
        super().__init__()
        self.vit = vit
        self.feature_weight, self.attn_weight = effective_weights(feature_decay, attn_loss)
        self.attn_layers = attn_layers if attn_loss else 0

    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[tuple[Tensor, ...], Float[Tensor, ""]]:
        """The logits of each head, and the weighted sum of the penalties."""
        vit = self.vit
        tokens = vit.embed(images)
        penalty = widened(tokens.new_zeros(()))
        for index, block, rotation in vit.stages():
            sharpen = index < self.attn_layers
            if sharpen or self.feature_weight:
                tokens, own = vit.run(self._run, block, tokens, rotation, sharpen)
                penalty = penalty + own
            else:
                tokens = vit.run(block, tokens, rotation)
            tokens = vit.entering(index + 1, tokens)
        tokens = vit.norm(vit.readout.read(tokens, vit.config.registers))
        return vit.forward_heads(tokens), penalty

    def _run(
        self, block: Block, x: Tensor, rotation: Rotation | None, sharpen: bool
    ) -> tuple[Tensor, Tensor]:
        """The stream after a block, and the block's penalties."""
        penalty = widened(x.new_zeros(()))
        maxima: list[Tensor] = []

        def attend(entered: Tensor, rotation: Rotation | None) -> Tensor:
            branch, highest = attend_with_maxima(cast(SelfAttention, block.attn), entered, rotation)
            maxima.append(highest)
            return branch

        middle = block.add_attention(x, rotation, attend if sharpen else None)
        after = block.add_mlp(middle)
        for highest in maxima:
            penalty = penalty + self.attn_weight * attention_penalty(highest)
        if self.feature_weight:
            features = feature_penalty(middle) + feature_penalty(after)
            penalty = penalty + self.feature_weight * features
        return after, penalty


def attend_with_maxima(
    attention: SelfAttention, x: Float[Tensor, "B N D"], rotation: Rotation | None
) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B H N"]]:
    """The output of the attention, and the largest probability of each row.

    The map has to exist for this, so it is made once and used for both.
    """
    q, k, v = attention.project(x, rotation)
    probs = attention.probabilities(q, k)
    return attention.leave(attention.weights(probs.to(v.dtype)) @ v, x), probs.amax(-1)
