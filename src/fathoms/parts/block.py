"""Transformer blocks: two residual branches, each joined to the stream by a norm, a placement and a scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.parts.attention import ATTENTIONS
from fathoms.parts.mlp import MLPS
from fathoms.parts.norms import NORMS
from fathoms.parts.placements import PLACEMENTS, DropPath, Site
from fathoms.parts.protocols import Part
from fathoms.parts.residuals import RESIDUALS, ConstantScale, Unscaled, build_residual
from fathoms.parts.rope import Rotation
from fathoms.parts.transfer import transfer_of


class Join(nn.Module):
    """The residual connection of one branch F to the stream x: norm, placement and scale.

    With N the norm and s the residual scale: "pre" x + s F(N x), "post" N(x + s F x),
    "pre_post" x + s N'(F(N x)), "res_post" x + s N(F x), "keel" N'(2L x + s F(N x)). F is given in the call.

    Args:
        dim: Width of a token.
        scale: The module of the residual method.
        placement: Name of the placement.
        norm: Name of the norm.
        place: Where the residual method acts: see `Method`.
        norm_init: Init of the norm; None: its default.
        drop_path: Probability of dropping the branch in training.
        branch: Number of this branch among all of the network, from 0.
        branches: How many the network has.
        shared: Whether `scale` belongs to the block, for both joins.

    >>> import torch
    >>> from fathoms.parts.residuals import LayerScale
    >>> join, x = Join(192, LayerScale(192)), torch.randn(2, 197, 192)
    >>> join(x, torch.nn.Linear(192, 192)).shape
    torch.Size([2, 197, 192])
    """

    def __init__(
        self,
        dim: int,
        scale: Part,
        placement: str = "pre",
        norm: str = "layernorm",
        *,
        place: str = "branch",
        norm_init: str | float | None = None,
        drop_path: float = 0.0,
        branch: int = 0,
        branches: int = 2,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.place, self.placement = place, placement
        placed = PLACEMENTS.build(placement, branch, branches)
        norms = [NORMS.build(norm, dim, init=norm_init) for _ in placed.sites]
        self.norm, self.post_norm = norms[0], norms[1] if len(norms) > 1 else None
        # The attribute of the norm at each place that has one.
        self.sites = dict(zip(placed.sites, ("norm", "post_norm"), strict=False))
        if shared:
            # The block has it. Under two names, torch.func would leave a tensor in the place of the parameter.
            object.__setattr__(self, "scale", scale)
        else:
            self.scale = scale
        self.enlarge = Unscaled(dim) if placed.skip == 1.0 else ConstantScale(dim, placed.skip)
        self.drop_path = DropPath(drop_path)

    def _normed(self, site: Site, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """The tokens that pass a place: normed if the placement has a norm there."""
        name = self.sites.get(site)
        return x if name is None else getattr(self, name)(x)

    def enter(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """The branch's input, from the stream x."""
        x = self._normed("enter", x)
        return self.scale(x) if self.place == "input" else x

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        branch: Callable[..., Float[Tensor, "B N D"]],
        context: Float[Tensor, "B M D"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """The stream after the branch, a function of the stream and of a context if one is given, has been added."""
        read = (x,) if context is None else (x, context)
        added = self._normed("leave", branch(*map(self.enter, read)))
        if self.place == "branch":
            added = self.scale(added)
        elif self.place == "update":
            added = self.scale(added, x)
        skip = self.scale(x) if self.place == "skip" else x
        return self._normed("outer", self.enlarge(skip) + self.drop_path(added))

    def flop_count(self, num_tokens: int) -> int:
        """The norms, the scale and the enlarged skip; an addition multiplies nothing."""
        norms = sum(norm.flop_count(num_tokens) for norm in (self.norm, self.post_norm) if norm is not None)
        return norms + self.scale.flop_count(num_tokens) + self.enlarge.flop_count(num_tokens)

    def enter_flops(self, num_tokens: int) -> int:
        """The part of `flop_count` spent in `enter`."""
        norm = self.norm.flop_count(num_tokens) if "enter" in self.sites else 0
        return norm + (self.scale.flop_count(num_tokens) if self.place == "input" else 0)


def check_residual(residual: str, norm: str, attn_placement: str, mlp_placement: str) -> None:
    """Refuse a residual method that contradicts the placement or the norm, and a placement without a norm."""
    method = RESIDUALS.metadata(residual)
    placements = {"attn_placement": attn_placement, "mlp_placement": mlp_placement}
    for field, placement in placements.items():
        PLACEMENTS.check(placement, field)
        if norm == "none" and placement != "pre":
            raise ConfigError(f"{field}={placement!r} places a norm, but norm is 'none'; use 'pre'")
        if placement not in method.placements:
            allowed = " or ".join(repr(name) for name in method.placements)
            raise ConfigError(
                f"residual {residual!r} contradicts {field}={placement!r}: {method.why}; use {allowed}"
            )
    if norm == "none" and method.needs_norm:
        raise ConfigError(f"residual {residual!r} needs a norm: {method.why}; norm is 'none'")


class Block(nn.Module):
    """One block of a Vision Transformer: attention, then MLP, each on a residual branch.

    Args:
        dim: Width of a token.
        heads: Number of heads; must divide `dim`.
        depth: Number of blocks of the whole network; several residual methods depend on it.
        index: Index of this block, from 0.
        mlp_ratio: Hidden width of the MLP, as a multiple of `dim`.
        norm: Name of the norm, with `norm_init` as its init; None takes the norm's default.
        attn_placement: Placement of the attention's norm: see `Join`.
        mlp_placement: Placement of the MLP's norm.
        residual: Name of the residual method, with `residual_init` as its init; None takes its rule for `depth`.
        attention: "softmax" or "talking_heads", with `qk_norm`, `qkv_bias` and `attn_gate`.
        mlp: "gelu" or "swiglu".
        base_depth: For methods that transfer over depth (completep): the depth that the learning rate was tuned at.
        base_dim: For the same methods: the width that it was tuned at.
        prefix: For mv_split: tokens in front of the patches.
        residual_warmup: For prores: share of a run by which the last block counts in full.
        drop_path: Probability of dropping a branch in training.

    >>> import torch
    >>> block = Block(64, 4, norm="rmsnorm", residual="layerscale", depth=36)
    >>> block(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        depth: int = 1,
        index: int = 0,
        mlp_ratio: float = 4.0,
        norm: str = "layernorm",
        norm_init: str | float | None = None,
        attn_placement: str = "pre",
        mlp_placement: str = "pre",
        residual: str = "none",
        residual_init: float | None = None,
        attention: str = "softmax",
        qk_norm: str = "none",
        qkv_bias: bool = True,
        attn_gate: str = "none",
        mlp: str = "gelu",
        base_depth: int | None = None,
        base_dim: int | None = None,
        prefix: int = 0,
        residual_warmup: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        check_residual(residual, norm, attn_placement, mlp_placement)
        self.depth, self.residual = depth, residual
        method = RESIDUALS.metadata(residual)
        self.transfer = transfer_of(residual, depth=depth, dim=dim, base_depth=base_depth, base_dim=base_dim)

        def scale() -> Part:
            place = {"depth": depth, "index": index, "prefix": prefix}
            own = {"factor": self.transfer.branch, "warmup": residual_warmup}
            return build_residual(residual, dim, init_value=residual_init, **place, **own)

        self.scale = scale() if method.per_block else None

        def join(branch: int, placement: str) -> Join:
            place = {"place": method.place, "branch": 2 * index + branch, "branches": 2 * depth}
            more = {"norm_init": norm_init, "drop_path": drop_path, "shared": method.per_block, **place}
            return Join(dim, self.scale or scale(), placement, norm, **more)

        gate = None if attn_gate == "none" else attn_gate
        options = {
            "qkv_bias": qkv_bias and method.layers.qkv_bias,
            "qk_norm": qk_norm,
            "layers": method.layers,
            "gate": gate,
        }
        self.attn_join = join(0, attn_placement)
        self.attn = ATTENTIONS.build(attention, dim, heads, **options)
        self.mlp_join = join(1, mlp_placement)
        self.mlp = MLPS.build(mlp, dim, mlp_ratio, layers=method.layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise both branches by the residual method's rule; their biases are zero."""
        for branch in (self.attn, self.mlp):
            # Looked up by name: functions of the method would keep a model from being pickled.
            RESIDUALS.metadata(self.residual).weights(branch, self.depth)
            for _, weight in branch.roles():
                weight.mul_(self.transfer.start)
            for module in branch.modules():
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Float[Tensor, "B N D"], rotation: Rotation | None = None) -> Float[Tensor, "B N D"]:
        return self.add_mlp(self.add_attention(x, rotation))

    def add_attention(
        self, x: Float[Tensor, "B N D"], rotation: Rotation | None = None, attend: Any = None
    ) -> Float[Tensor, "B N D"]:
        """The stream after the attention, for which `attend` may stand in."""
        attend = attend or self.attn
        return self.attn_join(x, lambda entered: attend(entered, rotation))

    def add_mlp(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return self.mlp_join(x, self.mlp)

    def flop_count(self, num_tokens: int) -> int:
        return sum(
            part.flop_count(num_tokens) for part in (self.attn_join, self.attn, self.mlp_join, self.mlp)
        )


class ClassBlock(Block):
    """One block of CaiT's second stage: only the queries are written, the context is read.

    Options as for `Block`, but for the attention, which is class attention.

    >>> import torch
    >>> ClassBlock(192, heads=4)(torch.randn(2, 1, 192), torch.randn(2, 196, 192)).shape
    torch.Size([2, 1, 192])

    Paper: Touvron et al. 2021, arXiv:2103.17239.
    """

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        super().__init__(dim, heads, attention="class_attention", **options)

    def forward(
        self, queries: Float[Tensor, "B Q D"], context: Float[Tensor, "B N D"]
    ) -> Float[Tensor, "B Q D"]:
        return self.add_mlp(self.attn_join(queries, self.attn, context))

    def flop_count(self, num_tokens: int, num_queries: int = 1) -> int:
        """Multiplications with `num_queries` queries over a context of `num_tokens` tokens."""
        own = sum(part.flop_count(num_queries) for part in (self.attn_join, self.mlp_join, self.mlp))
        return own + self.attn_join.enter_flops(num_tokens) + self.attn.flop_count(num_tokens, num_queries)
