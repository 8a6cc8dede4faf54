"""Patch embedding: the projection of patches to tokens, with norms before or after it."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError, ShapeError
from fathoms.parts.init import STD
from fathoms.parts.linear import linear_flops
from fathoms.parts.norm import LayerNorm
from fathoms.registry import Registry


class StemNorm(NamedTuple):
    """The norms of a stem, each None where there is none.

    Args:
        pre: On the pixels of each patch, before the projection.
        post: On each token, before positions are added.
        post_pos: On each token, after positions are added.
    """

    pre: LayerNorm | None = None
    post: LayerNorm | None = None
    post_pos: LayerNorm | None = None


STEM_NORMS: Registry[StemNorm, None] = Registry("stem_norm")


@STEM_NORMS.add("none")
def no_stem_norm(pixels: int, dim: int) -> StemNorm:
    """The patch projection alone."""
    del pixels, dim
    return StemNorm()


@STEM_NORMS.add("pre")
def pre_norm(pixels: int, dim: int) -> StemNorm:
    """A LayerNorm on the pixels of each patch."""
    del dim
    return StemNorm(pre=LayerNorm(pixels))


@STEM_NORMS.add("post")
def post_norm(pixels: int, dim: int) -> StemNorm:
    """A LayerNorm on the token, before positions are added."""
    del pixels
    return StemNorm(post=LayerNorm(dim))


@STEM_NORMS.add("dual")
def dual_norm(pixels: int, dim: int) -> StemNorm:
    """Dual PatchNorm: both pre and post, arXiv:2302.01327."""
    return StemNorm(pre=LayerNorm(pixels), post=LayerNorm(dim))


@STEM_NORMS.add("post_pos")
def post_position_norm(pixels: int, dim: int) -> StemNorm:
    """A LayerNorm on the token, after positions are added."""
    del pixels
    return StemNorm(post_pos=LayerNorm(dim))


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
        stem_norm: Where the LayerNorms are: "none", "pre" (on the pixels of a patch), "post" (on the
            token), "dual" (both), "post_pos" (on the token, after positions are added).

    Paper: Dosovitskiy et al. 2020, arXiv:2010.11929.
    """

    def __init__(self, dim: int, patch_size: int = 16, in_channels: int = 3, stem_norm: str = "none") -> None:
        super().__init__()
        if patch_size < 1:
            raise ConfigError(f"patch_size={patch_size} is too small; use 1 or more")
        self.patch_size, self.in_channels = patch_size, in_channels
        pixels = patch_size * patch_size * in_channels
        norms = STEM_NORMS.build(stem_norm, pixels, dim)
        self.ln0 = norms.pre
        self.proj = nn.Linear(pixels, dim)
        self.ln1 = norms.post
        self.ln_pos = norms.post_pos
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projection with the truncated normal and a zero bias."""
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
        """The norm after the positions, if there is one."""
        return tokens if self.ln_pos is None else self.ln_pos(tokens)

    def flop_count(self, num_tokens: int) -> int:
        """The projection and the norms."""
        norms = [norm for norm in (self.ln0, self.ln1, self.ln_pos) if norm is not None]
        return linear_flops(self.proj, num_tokens) + sum(norm.flop_count(num_tokens) for norm in norms)


class DualPatchNorm(PatchEmbed):
    """LN(W LN(patch) + c): a LayerNorm on the pixels of each patch and one on the token made of them.

    `ln0.weight` reshaped to (patch_size, patch_size, in_channels) shows how much each pixel counts.

    Paper: Kumar et al. 2023, arXiv:2302.01327.
    """

    def __init__(self, dim: int, patch_size: int = 16, in_channels: int = 3) -> None:
        super().__init__(dim, patch_size, in_channels, stem_norm="dual")
