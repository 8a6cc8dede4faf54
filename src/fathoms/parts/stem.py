"""Stems, from pixels to tokens: the projection of patches, with norms before or after it, or convolutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.fx import Proxy

from fathoms.errors import ConfigError, ShapeError
from fathoms.parts.linears import STD, linear_flops
from fathoms.parts.norms import LayerNorm
from fathoms.parts.protocols import Stem
from fathoms.registry import Registry, check_name

STEMS: Registry[Stem, None] = Registry("stem")


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


def _trunc_normal(projection: nn.Linear) -> None:
    nn.init.trunc_normal_(projection.weight, std=STD)
    nn.init.zeros_(projection.bias)


# Starts of the patch projection. fan_in is that of torch's convolutions, weights and bias uniform within
# inputs^-1/2, which timm, DeiT, CaiT and the author of LearnableScaler keep: tokens are as large at any patch size.
STEM_INITS: dict[str, Callable[[nn.Linear], None]] = {
    "fan_in": nn.Linear.reset_parameters,
    "trunc_normal": _trunc_normal,
}


def sides(patch_size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a patch, given as one number or as both."""
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    if min(height, width) < 1:
        raise ConfigError(f"patch_size={patch_size} is too small; use 1 or more")
    return height, width


def patchify(images: Float[Tensor, "B C H W"], patch_size: int | tuple[int, int]) -> Float[Tensor, "B N P"]:
    """Cut images into patches, square or of (height, width), each flattened in the order (row, column, channel).

    >>> import torch
    >>> patchify(torch.randn(2, 3, 224, 224), patch_size=16).shape
    torch.Size([2, 196, 768])
    """
    height, width = images.shape[-2:]
    rows, columns = sides(patch_size)
    if height % rows or width % columns:
        raise ShapeError(
            f"images of {height}x{width} cannot be cut into patches of {patch_size}; resize or pad them"
        )
    # Sizes out of the shape: torch's older ONNX exporter keeps the batch free then.
    down, across = height // rows, width // columns
    patches = images.reshape(images.shape[0], images.shape[1], down, rows, across, columns)
    patches = patches.permute(0, 2, 4, 3, 5, 1)
    return patches.reshape(images.shape[0], down * across, rows * columns * images.shape[1])


def _check_channels(images: Tensor, in_channels: int) -> None:
    if isinstance(images, Proxy):
        raise ShapeError(
            "torch.fx cannot trace through the parts of a ViT; give its tracer fathoms.parts.LEAVES as leaf modules"
        )
    if images.shape[1] != in_channels:
        raise ShapeError(
            f"images have {images.shape[1]} channels, the model takes {in_channels}; "
            "convert them or build the model with in_channels"
        )


@STEMS.add("patch")
class PatchEmbed(nn.Module):
    """Project each patch to a token: y = W patch + c, the patch flattened as (row, column, channel).

    Args:
        dim: Width of a token.
        patch_size: Side of a patch in pixels, or (height, width); images may be of any size that it divides.
        in_channels: Channels of an image.
        stem_norm: Where the LayerNorms are: "none", "pre" (on the pixels of a patch), "post" (on the
            token), "dual" (both), "post_pos" (on the token, after positions are added).
        stem_init: A name in STEM_INITS, for the start of W and c.

    >>> import torch
    >>> PatchEmbed(192)(torch.randn(2, 3, 224, 224)).shape
    torch.Size([2, 196, 192])

    Paper: Dosovitskiy et al. 2020, arXiv:2010.11929.
    """

    def __init__(
        self,
        dim: int,
        patch_size: int | tuple[int, int] = 16,
        in_channels: int = 3,
        stem_norm: str = "none",
        stem_init: str = "fan_in",
    ) -> None:
        super().__init__()
        self.patch_size, self.in_channels = patch_size, in_channels
        self.stem_init = check_name(stem_init, STEM_INITS, "start", "stem_init")
        pixels = math.prod(sides(patch_size)) * in_channels
        norms = STEM_NORMS.build(stem_norm, pixels, dim)
        self.ln0 = norms.pre
        self.proj = nn.Linear(pixels, dim)
        self.ln1 = norms.post
        self.ln_pos = norms.post_pos
        self.reset_parameters()

    def reset_parameters(self) -> None:
        STEM_INITS[self.stem_init](self.proj)

    def forward(self, x: Float[Tensor, "B *any"], placed: bool = False) -> Float[Tensor, "B N D"]:
        """One token for each patch of the images x, row by row; of `placed` tokens, the last norm."""
        if placed and self.ln_pos is not None:
            return self.ln_pos(x)
        _check_channels(x, self.in_channels)
        x = patchify(x, self.patch_size)
        if self.ln0 is not None:
            x = self.ln0(x)
        x = self.proj(x)
        return x if self.ln1 is None else self.ln1(x)

    def after_position(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return tokens if self.ln_pos is None else self(tokens, placed=True)

    def flop_count(self, num_tokens: int) -> int:
        norms = [norm for norm in (self.ln0, self.ln1, self.ln_pos) if norm is not None]
        return linear_flops(self.proj, num_tokens) + sum(norm.flop_count(num_tokens) for norm in norms)


class DualPatchNorm(PatchEmbed):
    """LN(W LN(patch) + c): a LayerNorm on the pixels of each patch and one on the token made of them.

    `ln0.weight` reshaped to (height, width, in_channels) of a patch shows how much each pixel counts.

    >>> import torch
    >>> DualPatchNorm(192, patch_size=(8, 16))(torch.randn(2, 3, 96, 224)).shape
    torch.Size([2, 168, 192])

    Paper: Kumar et al. 2023, arXiv:2302.01327.
    """

    def __init__(self, dim: int, patch_size: int | tuple[int, int] = 16, in_channels: int = 3) -> None:
        super().__init__(dim, patch_size, in_channels, stem_norm="dual")


def conv_stride(patch_size: int, layers: int) -> int:
    """The stride of each convolution of a conv stem whose cells are `patch_size` pixels apart; pooling halves too."""
    stride = next((s for s in range(1, patch_size + 1) if (2 * s) ** layers >= patch_size), 0)
    if not stride or (2 * stride) ** layers != patch_size:
        raise ConfigError(
            f"patch_size={patch_size} is not the stride of {layers} convolutions, each with pooling by 2; "
            f"use for example {2**layers} or {4**layers}"
        )
    return stride


@STEMS.add("conv")
class ConvStem(nn.Module):
    """CCT's tokenizer: convolution, ReLU, and max-pooling 3x3 by 2, `layers` times; a token for each cell.

    The cells are `patch_size` pixels apart, which every layer divides by twice its stride. Convolutions have no bias
    and start from He's normal; between them are 64 channels.

    Args:
        dim: Width of a token.
        patch_size: Pixels between two cells of the grid.
        in_channels: Channels of an image.
        stem_norm: "none", "post" (a LayerNorm on the token) or "post_pos" (after positions are added).
        layers: Number of convolutions.
        kernel: Side of their kernels.

    >>> import torch
    >>> ConvStem(256)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 256, 256])

    Paper: Hassani et al. 2021, arXiv:2104.05704.
    """

    def __init__(
        self,
        dim: int,
        patch_size: int = 2,
        in_channels: int = 3,
        stem_norm: str = "none",
        layers: int = 1,
        kernel: int = 3,
    ) -> None:
        super().__init__()
        stride = conv_stride(patch_size, layers)
        self.patch_size, self.in_channels, self.stride = patch_size, in_channels, stride
        norms = STEM_NORMS.build(stem_norm, dim, dim)
        if norms.pre is not None:
            raise ConfigError(
                f"stem_norm {stem_norm!r} norms the pixels of a patch, which stem 'conv' has not; use 'post'"
            )
        channels = [in_channels, *[64] * (layers - 1), dim]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False) for a, b in itertools.pairwise(channels)
        )
        self.ln1 = norms.post
        self.ln_pos = norms.post_pos
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for conv in self.convs:
            nn.init.kaiming_normal_(cast(nn.Conv2d, conv).weight)

    def forward(self, x: Float[Tensor, "B *any"], placed: bool = False) -> Float[Tensor, "B N D"]:
        """One token for each cell of the images x, row by row; of `placed` tokens, the last norm."""
        if placed and self.ln_pos is not None:
            return self.ln_pos(x)
        _check_channels(x, self.in_channels)
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 3, 2, 1)
        x = x.flatten(2).transpose(1, 2)
        return x if self.ln1 is None else self.ln1(x)

    def after_position(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return tokens if self.ln_pos is None else self(tokens, placed=True)

    def flop_count(self, num_tokens: int) -> int:
        """The convolutions, each before its pooling, and the norms."""
        cells, count = num_tokens * self.patch_size**2, 0
        for conv in self.convs:
            cells //= self.stride**2
            count += cells * cast(nn.Conv2d, conv).weight.numel()
            cells //= 4
        norms = [norm for norm in (self.ln1, self.ln_pos) if norm is not None]
        return count + sum(norm.flop_count(num_tokens) for norm in norms)
