"""From pixels to tokens: the patch projection, with norms before or after it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError, ShapeError
from fathoms.parts.init import STD
from fathoms.parts.linear import linear_flops
from fathoms.parts.norm import LayerNorm
from fathoms.registry import Registry


@dataclass(frozen=True)
class StemNorm:
    """Which of the three places in a stem hold a LayerNorm."""

    before: bool = False
    after: bool = False
    after_position: bool = False


STEM_NORMS: Registry[StemNorm] = Registry("stem_norm")
for _name, _places, _summary in (
    ("none", StemNorm(), "The patch projection alone."),
    ("pre", StemNorm(before=True), "A LayerNorm on the pixels of each patch."),
    ("post", StemNorm(after=True), "A LayerNorm on the token, before positions are added."),
    ("dual", StemNorm(before=True, after=True), "Dual PatchNorm: both pre and post, arXiv:2302.01327."),
    ("post_pos", StemNorm(after_position=True), "A LayerNorm on the token once positions are added."),
):
    STEM_NORMS.add(_name, _places, _summary)(StemNorm)


def patchify(images: Float[Tensor, "B C H W"], patch_size: int) -> Float[Tensor, "B N P"]:
    """Cut images into square patches, each flattened in the order (row, column, channel)."""
    height, width = images.shape[-2:]
    if height % patch_size or width % patch_size:
        raise ShapeError(
            f"images of {height}x{width} cannot be cut into patches of {patch_size}; resize or pad them"
        )
    patches = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class PatchEmbed(nn.Module):
    """Project each patch to a token: y = W patch + c, the patch flattened as (row, column, channel).

    Args:
        dim: Width of a token.
        patch_size: Side of a patch in pixels.
        in_channels: Channels of an image.
        stem_norm: Where LayerNorms stand: "none", "pre" (on the pixels of a patch), "post" (on the
            token), "dual" (both), "post_pos" (on the token once positions are added).

    Paper: Dosovitskiy et al. 2020, arXiv:2010.11929.
    """

    def __init__(self, dim: int, patch_size: int = 16, in_channels: int = 3, stem_norm: str = "none") -> None:
        super().__init__()
        if patch_size < 1:
            raise ConfigError(f"model.patch_size={patch_size} is no size; use 1 or more")
        self.patch_size, self.in_channels = patch_size, in_channels
        pixels = patch_size * patch_size * in_channels
        places: StemNorm = STEM_NORMS.about(stem_norm)
        self.ln0 = LayerNorm(pixels) if places.before else None
        self.proj = nn.Linear(pixels, dim)
        self.ln1 = LayerNorm(dim) if places.after else None
        self.ln_pos = LayerNorm(dim) if places.after_position else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the projection from the truncated normal, without a shift."""
        nn.init.trunc_normal_(self.proj.weight, std=STD)
        nn.init.zeros_(self.proj.bias)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        """One token for each patch, row by row."""
        if images.shape[1] != self.in_channels:
            raise ShapeError(
                f"images have {images.shape[1]} channels, the model takes {self.in_channels}; "
                "convert them or build the model with in_channels"
            )
        x = patchify(images, self.patch_size)
        if self.ln0 is not None:
            x = self.ln0(x)
        x = self.proj(x)
        return x if self.ln1 is None else self.ln1(x)

    def after_position(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """The norm that stands behind the positions, if there is one."""
        return tokens if self.ln_pos is None else self.ln_pos(tokens)

    def flop_count(self, num_tokens: int) -> int:
        """The projection and the norms."""
        norms = [norm for norm in (self.ln0, self.ln1, self.ln_pos) if norm is not None]
        return linear_flops(self.proj, num_tokens) + sum(norm.flop_count(num_tokens) for norm in norms)


class DualPatchNorm(PatchEmbed):
    """LN(W LN(patch) + c): a LayerNorm on the pixels of each patch and one on the token made of them.

    `ln0.weight` reshaped to (patch_size, patch_size, in_channels) is a picture of which pixels count.

    Paper: Kumar et al. 2023, arXiv:2302.01327.
    """

    def __init__(self, dim: int, patch_size: int = 16, in_channels: int = 3) -> None:
        super().__init__(dim, patch_size, in_channels, stem_norm="dual")
