"""Residual methods: the scale of a branch, with the init and the placements that belong to it.

A method acts at one place: it multiplies the branch, the skip, or the branch's input, or it makes the update of the
stream from branch and stream. It may bring its own weight init and its own layers, and it may be defined for some
placements only; its metadata, a `Method`, says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.ops.dispatch import in_dtype, wide
from fathoms.parts import linears
from fathoms.parts.linears import PLAIN, SHIFTED, Layers
from fathoms.parts.placements import PLACEMENTS
from fathoms.parts.protocols import Part
from fathoms.registry import Registry


@dataclass(frozen=True)
class Method:
    """Properties of a residual method that the block builder reads, besides its module.

    Args:
        start: The method's init_value as a function of the number of blocks; None if it has none.
        weights: Init rule of the branch's linears.
        place: Where the module acts; "update" calls it with the branch and the stream.
        takes: Which keywords of `build_residual` the module is built with.
        placements: Placements of the norm that the method allows.
        why: The reason for a restriction, for the error message.
        needs_norm: Whether the method is defined with a norm only.
        per_block: One module for both branches of a block instead of one each.
        layers: What the branch builds its linears and activations with.
        zero_head: Whether the classifier starts at zero.
        embeddings: Factor of what the tokens start from, by the number of blocks; None for one.
        alpha: Exponent of the depth in the rules of `transfer`; None if the method has no such rules.
        reads_patches: Whether the module tells patches from other tokens.
    """

    start: Callable[[int], float] | None = None
    weights: linears.Rule = linears.trunc_normal
    place: Literal["branch", "skip", "input", "update"] = "branch"
    takes: tuple[str, ...] = ()
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    why: str = ""
    needs_norm: bool = False
    per_block: bool = False
    layers: Layers = PLAIN
    zero_head: bool = False
    embeddings: Callable[[int], float] | None = None
    alpha: float | None = None
    reads_patches: bool = False


RESIDUALS: Registry[Part, Method] = Registry("residual", default=Method())


def build_residual(
    name: str,
    dim: int,
    *,
    depth: int,
    index: int,
    init_value: float | None = None,
    **more: float | int | None,
) -> Part:
    """The module of method `name` for block `index` of `depth`; None takes the method's default.

    Args:
        name: The method.
        dim: Width of a token.
        depth: Number of blocks.
        index: The block's index, from 0.
        init_value: The method's start.
        **more: What some methods take besides: `factor`, `prefix` and `warmup`.
    """
    method = RESIDUALS.metadata(name)
    if init_value is None and method.start is not None:
        init_value = method.start(depth)
    known = {"depth": depth, "index": index, **more}
    given = {key: value for key, value in known.items() if key in method.takes}
    return RESIDUALS.build(name, dim, init_value=init_value, **given)


@RESIDUALS.add(
    "tfixup",
    Method(weights=linears.tfixup, embeddings=lambda depth: (9 * depth) ** -0.25),
    "The branch as it is, under T-Fixup's start of weights and embeddings.",
)
@RESIDUALS.add("none", Method())
class Unscaled(nn.Module):
    """The branch as it is: y = x.

    T-Fixup acts on the start alone: that of the branches, and (9L)^-1/4 on the embeddings, which here are patch
    projection, positions and query tokens: Huang et al. 2020, proceedings.mlr.press/v119/huang20f.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return x

    def flop_count(self, num_tokens: int) -> int:
        return 0 * num_tokens


def layerscale_start(depth: int) -> float:
    """CaiT's rule, by the depth of the whole network: 0.1 to 18 blocks, 1e-5 to 24, 1e-6 beyond."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


@RESIDUALS.add("layerscale", Method(start=layerscale_start))
class LayerScale(nn.Module):
    """Scale each channel of a branch: y[..., c] = gamma[c] * x[..., c], gamma learned.

    The shape of x is any (..., dim): tokens (B, N, D), channels-last maps (B, H, W, D), videos (B, T, H, W, D). y has
    its shape and dtype.

    With a small start the skip carries the signal through a deep network at first, which keeps gradients from growing
    from about 24 blocks on; each channel of a branch comes in as far as it has learned something. Gamma has no weight
    decay (`exempt_from_decay`): decay pulls towards zero, and so towards a silent branch. A linear would mix channels
    with dim² weights, and a scalar gate (`ReZero`, `SkipInit`) weighs all channels of a branch alike; this is the
    diagonal map between them, dim weights, and it folds into the linear in front of it.

    Args:
        dim: Length of gamma, the last axis of x.
        init_value: Where every element of gamma starts. 1e-4 from scratch, as in DeiT-III and ViT-5; CaiT's rule by
            depth (`layerscale_start`) has 0.1 up to 18 blocks, 1e-5 up to 24 and 1e-6 beyond; 1.0 is no gate at the
            start, for branches that are trained already. 0 means 0: the branch is silent until gamma moves.

    >>> scale = LayerScale(768, init_value=1e-4)
    >>> scale(torch.ones(2, 196, 768)).shape, scale.flop_count(num_tokens=196)
    (torch.Size([2, 196, 768]), 150528)

    Paper: Touvron et al. 2021, arXiv:2103.17239.
    """

    # Weight decay would pull the branch shut.
    exempt_from_decay = ("gamma",)

    def __init__(self, dim: int, init_value: float = 1e-4) -> None:
        super().__init__()
        self.init_value = init_value
        self.gamma = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init_value)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return in_dtype(x * self.gamma, x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        """num_tokens * dim: one multiplication per element; `flop_count` counts no additions anywhere."""
        return num_tokens * self.gamma.shape[0]


class Scalar(nn.Module):
    """One learned number for a whole branch: y = alpha * x."""

    exempt_from_decay = ("alpha",)

    def __init__(self, dim: int, init_value: float = 0.0) -> None:
        super().__init__()
        self.dim, self.init_value = dim, init_value
        # One element, not zero-dimensional: sharded training (FSDP2) takes no scalars.
        self.alpha = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.init_value)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return in_dtype(x * self.alpha, x.dtype)

    def flop_count(self, num_tokens: int) -> int:
        return num_tokens * self.dim


@RESIDUALS.add(
    "rezero_shared",
    Method(start=lambda _: 0.0, weights=linears.xavier, per_block=True),
    "y = alpha * x, one alpha for both branches of a block, as ReZero's authors have it.",
)
@RESIDUALS.add("rezero", Method(start=lambda _: 0.0, weights=linears.xavier))
class ReZero(Scalar):
    """y = alpha * x with alpha starting at zero, one per branch; "rezero_shared" has one per block.

    >>> ReZero(192)(torch.ones(2, 197, 192)).any()
    tensor(False)

    Paper: Bachlechner et al. 2020, arXiv:2003.04887.
    """


@RESIDUALS.add("skipinit", Method(start=lambda _: 0.0, weights=linears.he))
class SkipInit(Scalar):
    """y = alpha * x with alpha starting at zero, one per branch, under He-initialised weights.

    As a function it equals ReZero per branch; the two papers differ in how the weights start.

    >>> SkipInit(192)(torch.ones(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: De & Smith 2020, arXiv:2002.10444.
    """


@RESIDUALS.add("fixup", Method(start=lambda _: 1.0, weights=linears.fixup, layers=SHIFTED, zero_head=True))
class FixupScale(Scalar):
    """y = alpha * x with alpha starting at one; the branch's last layer starts at zero instead.

    >>> FixupScale(192)(torch.ones(2, 197, 192)).shape
    torch.Size([2, 197, 192])

    Paper: Zhang et al. 2019, arXiv:1901.09321.
    """

    def __init__(self, dim: int, init_value: float = 1.0) -> None:
        super().__init__(dim, init_value)


class ConstantScale(nn.Module):
    """Multiply by a fixed number: y = factor * x."""

    def __init__(self, dim: int, factor: float = 1.0) -> None:
        super().__init__()
        self.dim, self.factor = dim, factor

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return x * self.factor

    def flop_count(self, num_tokens: int) -> int:
        return num_tokens * self.dim


@RESIDUALS.add(
    "deepnorm",
    Method(
        weights=linears.deepnorm,
        place="skip",
        takes=("depth",),
        placements=("post",),
        why="it enlarges the skip and relies on the norm after each addition",
        needs_norm=True,
    ),
)
class DeepNorm(ConstantScale):
    """Enlarge the skip: y = (2L)^1/4 * x, to be followed by the addition and a norm.

    >>> DeepNorm(192, depth=8)(torch.ones(2, 197, 192))[0, 0, 0]
    tensor(2.)

    Paper: Wang et al. 2022, arXiv:2203.00555.
    """

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__(dim, (2 * depth) ** 0.25)


@RESIDUALS.add(
    "depth_mup",
    Method(takes=("factor",), alpha=0.5),
    "y = x / sqrt(m_L), m_L = depth / base_depth, with the learning rates of depth-muP.",
)
@RESIDUALS.add("completep", Method(takes=("factor",), alpha=1.0))
class DepthTransfer(ConstantScale):
    """y = x / m_L, m_L = depth / base_depth, with CompleteP's learning rates, decay and epsilon.

    The other half of the method is in the parameter groups: see `fathoms.parts.transfer` for the table.
    "depth_mup" divides by the square root of m_L.

    >>> DepthTransfer(192, factor=12 / 48)(torch.ones(2, 197, 192))[0, 0, 0]
    tensor(0.2500)

    Papers: Dey et al. 2025, arXiv:2505.01618; Yang et al. 2023, arXiv:2310.02244.
    """


@RESIDUALS.add(
    "layernorm_scaling",
    Method(
        place="input",
        takes=("index",),
        placements=("pre", "pre_post"),
        why="it divides the output of the norm before the branch",
        needs_norm=True,
    ),
)
class LayerNormScaling(ConstantScale):
    """Damp deeper blocks: y = x / sqrt(index + 1), applied to the branch's input.

    >>> LayerNormScaling(192, index=3)(torch.ones(2, 197, 192))[0, 0, 0]
    tensor(0.5000)

    Paper: Sun et al. 2025, arXiv:2502.05795.
    """

    number: Tensor

    def __init__(self, dim: int, index: int) -> None:
        super().__init__(dim, (index + 1) ** -0.5)
        self.index = index
        # A tensor: blocks whose code holds different numbers would each be compiled. Whole: casting keeps it.
        self.register_buffer("number", torch.empty(1, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.number.fill_(self.index + 1)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return in_dtype(x * self.number.to(wide(x.dtype)).rsqrt(), x.dtype)
