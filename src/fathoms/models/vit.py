"""The Vision Transformer: a stem, positions, blocks and a read-out, each chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fathoms.errors import ConfigError, ShapeError
from fathoms.models import builder
from fathoms.models.config import FIELDS, ViTConfig
from fathoms.models.pretrained import Pretrained
from fathoms.models.weights import load_weights, refill_tables
from fathoms.models.zoo import model_config
from fathoms.parts.block import Block
from fathoms.parts.linears import STD, linear_flops
from fathoms.parts.modes import refuse_script
from fathoms.parts.readout import READOUTS
from fathoms.parts.residuals import RESIDUALS
from fathoms.parts.rope import Rope2d, Rotation
from fathoms.parts.transfer import Transfer
from fathoms.registry import check_name


def check_images(images: Tensor, size: int, channels: int) -> None:
    """Refuse images of another shape than (B, channels, size, size)."""
    if images.ndim != 4:
        shape = tuple(images.shape)
        raise ShapeError(f"images have the shape {shape}; give a batch (B, {channels}, {size}, {size})")
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = getattr(images, "dtype", type(images))
        raise ShapeError(f"images are {kind}; give a tensor of floats, normalised as in training")
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return
    if images.shape[1] == height == size and width == channels:
        raise ShapeError(f"images have their {channels} channels last; give (B, {channels}, {size}, {size})")
    raise ShapeError(
        f"images are {height}x{width}, the model takes {size}x{size}; resize them or build the model "
        f"with image_size={height}"
    )


# A step of its own in graphs of torch.fx, which cannot follow it.
torch.fx.wrap("check_images")


class ViT(Pretrained):
    """A Vision Transformer built from its config: images in, logits out.

    Tokens are in the order queries (cls, distillation), registers, patches.

    >>> vit = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, heads=4, depth=2, num_classes=10))
    >>> vit(torch.randn(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    exempt_from_decay = ("registers",)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.image_size = config.image_size
        self.num_features = config.dim
        self.grad_checkpointing = False
        # The dtype of the residual stream; None keeps that of the stem, which under autocast is autocast's.
        self.stream_dtype: torch.dtype | None = None
        self.stem = builder.build_stem(config)
        self.position = builder.build_position(config)
        self.registers = nn.Parameter(torch.empty(config.registers, config.dim)) if config.registers else None
        self.blocks = builder.build_blocks(config)
        self.readout = builder.build_readout(config)
        self.norm = builder.build_final_norm(config)
        self.head_scale = builder.build_head_scale(config)
        self.head = builder.build_head(config)
        self.head_dist = builder.build_head(config) if config.distill_token else None
        self.reset_parameters()
        self.register_load_state_dict_post_hook(refill_tables)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every parameter and table, also after `to_empty` on a meta model.

        Children come before their parents, so that a block's init rule overrides that of its linears.
        """
        for module in reversed(list(self.modules())):
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()
        if self.registers is not None:
            nn.init.trunc_normal_(self.registers, std=STD)
        embeddings = RESIDUALS.metadata(self.config.residual).embeddings
        if embeddings is not None:
            for table in self._embeddings():
                table.mul_(embeddings(self.config.depth))
        for head in (self.head, self.head_dist):
            if isinstance(head, nn.Linear):
                builder.reset_head(head, self.config)

    def _embeddings(self) -> Iterator[nn.Parameter]:
        """Parameters that the first tokens are proportional to."""
        stem = cast(Any, self.stem)
        source = stem.ln1 or (stem.proj if self.config.stem == "patch" else stem.convs[-1])
        for module, deep in ((source, True), (self.position, True), (self.readout, False), (self, False)):
            yield from cast(nn.Module, module).parameters(recurse=deep)

    @property
    def transfer(self) -> Transfer:
        """Ratios of depth and width to those that the learning rate was tuned at; ones for most residual methods."""
        return builder.config_transfer(self.config)

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    @property
    def rope(self) -> Rope2d | None:
        """The rotation of q and k, or None."""
        return self.position.rope

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches in the last block."""
        return self.readout.travelling + self.config.registers

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    @property
    def grid(self) -> int:
        """Number of patches along a side at the current image size."""
        return self.image_size // self.config.patch_size

    def set_image_size(self, image_size: int) -> None:
        """Switch to another image size, with positions resized to it.

        Parameters keep their shapes: a learned table keeps the grid of `config.image_size` and is resized at
        every call. `config` does not change.
        """
        if image_size < 1 or image_size % self.config.patch_size:
            raise ConfigError(
                f"image_size={image_size} cannot be cut into patches of {self.config.patch_size}; use a multiple"
            )
        if image_size == self.image_size:
            return
        self.image_size = image_size
        self.position.set_grid(self.grid)

    def get_classifier(self) -> nn.Module:
        """The classifier that reads the class token."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by a new one of `num_classes` outputs; 0 for none."""
        self.config = self.config.replace(num_classes=num_classes)
        self.card = {name: value for name, value in self.card.items() if name != "classes"}
        self.head_scale = builder.build_head_scale(self.config)
        self.head = builder.build_head(self.config)
        if self.head_dist is not None:
            self.head_dist = builder.build_head(self.config)
        for module in (self.head_scale, self.head, self.head_dist):
            if module is not None:
                module.to(**self._home()).train(self.training)

    def _home(self) -> dict[str, Any]:
        """Device and dtype of the model, for new modules."""
        like = next(self.stem.parameters())
        return {"device": like.device, "dtype": like.dtype}

    def embed(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        """The tokens that enter the first block."""
        check_images(images, self.image_size, self.config.in_channels)
        tokens = self.stem(images)
        if self.stream_dtype is not None:
            tokens = tokens.to(self.stream_dtype)
        tokens = self.stem.after_position(self.position(tokens))
        if self.registers is not None:
            registers = self.registers.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
            tokens = torch.cat([registers, tokens], dim=1)
        return self.entering(0, tokens)

    __prepare_scriptable__ = refuse_script

    def entering(self, index: int, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B M D"]:
        """The tokens that enter block `index`, from those that left the one before: queries join in front of one."""
        return self.readout.start(tokens) if index == self.readout.joins else tokens

    def stages(self) -> Iterator[tuple[int, Block, Rotation | None]]:
        """Each block with its index and the rotation of q and k for the tokens that it sees."""
        whole = None if self.rope is None else self.rope()
        # Queries are the first tokens; until they join, their rotations are left out.
        late = None if whole is None else Rotation(*(table[self.readout.travelling :] for table in whole))
        for index, block in enumerate(cast(Iterable[Block], self.blocks)):
            yield index, block, late if index < self.readout.joins else whole

    def run(self, block: Callable[..., Any], *inputs: Any) -> Any:
        """Call a block, or a function around one, recomputed in the backward pass under gradient checkpointing."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def forward_features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        """All tokens after the read-out's last block and the final norm."""
        return self.norm(self.readout.finish(self._stream(images), self.config.registers))

    def _stream(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        tokens = self.embed(images)
        for index, block, rotation in self.stages():
            tokens = self.entering(index + 1, self.run(block, tokens, rotation))
        return tokens

    def forward_heads(self, tokens: Float[Tensor, "B N D"]) -> tuple[Tensor, ...]:
        """The logits of each head: one, or with a distillation token two."""
        pooled = self.readout.pool(tokens, self.config.registers)
        pooled = pooled if self.head_scale is None else self.head_scale(pooled)
        heads = (self.head,) if self.head_dist is None else (self.head, self.head_dist)
        return tuple(head(pooled[:, index]) for index, head in enumerate(heads))

    def forward_head(self, tokens: Float[Tensor, "B N D"], pre_logits: bool = False) -> Float[Tensor, "B C"]:
        """Logits from tokens, the mean of both heads where there are two; or the vectors they read."""
        if pre_logits:
            return self.readout.pool(tokens, self.config.registers).mean(dim=1)
        logits = self.forward_heads(tokens)
        return logits[0] if len(logits) == 1 else (logits[0] + logits[1]) / 2

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C_out"]:
        """Logits of each image; the final norm runs on the tokens that are read only."""
        read = self.readout.read(self._stream(images), self.config.registers)
        return self.forward_head(self.norm(read))

    def forward_intermediates(
        self,
        images: Float[Tensor, "B C H W"],
        indices: int | Sequence[int] | None = None,
        *,
        norm: bool = False,
        output_fmt: str = "NCHW",
        return_prefix_tokens: bool = False,
        intermediates_only: bool = False,
        stop_early: bool = False,
    ) -> Any:
        """The final tokens and the tokens after chosen blocks, with timm's interface.

        Args:
            images: A batch.
            indices: The last n blocks for a number, these blocks for a list, all for None.
            norm: Whether the final norm is applied to the intermediates too.
            output_fmt: "NCHW" maps or "NLC" sequences of the patches.
            return_prefix_tokens: Give each intermediate as (patches, prefix tokens).
            intermediates_only: Leave the final tokens out.
            stop_early: With `intermediates_only`, run no block after the last chosen one; final tokens need them all.
        """
        check_name(output_fmt, ("NCHW", "NLC"), "output_fmt", "forward_intermediates")
        wanted = take_indices(indices, self.config.depth)
        tokens = self.embed(images)
        taken = []
        for index, block, rotation in self.stages():
            tokens = self.run(block, tokens, rotation)
            if index in wanted:
                shown = self.norm(tokens) if norm else tokens
                taken.append(self._intermediate(shown, index, output_fmt, return_prefix_tokens))
            if stop_early and intermediates_only and index == max(wanted, default=-1):
                break
            tokens = self.entering(index + 1, tokens)
        if intermediates_only:
            return taken
        return self.norm(self.readout.finish(tokens, self.config.registers)), taken

    def _intermediate(self, tokens: Tensor, index: int, output_fmt: str, with_prefix: bool) -> Any:
        front = builder.prefix_tokens(self.config, index)
        prefix, patches = tokens[:, :front], tokens[:, front:]
        if output_fmt == "NCHW":
            patches = patches.transpose(1, 2).unflatten(2, (self.grid, self.grid)).contiguous()
        return (patches, prefix) if with_prefix else patches

    def flop_count(self) -> int:
        """Multiplications of one image's forward pass: a linear on N tokens counts N * in * out.

        Functions (exp, erf, tanh, square root) count nothing, a division counts as a multiplication.
        """
        config = self.config
        patches = self.grid**2
        # A read-out without queries reads all tokens.
        traits = READOUTS.metadata(config.readout)
        read = config.queries if traits.queries or traits.travels else patches + config.registers
        heads = [head for head in (self.head, self.head_dist) if isinstance(head, nn.Linear)]
        # Queries that join late are not rotated before.
        late = 0 if self.rope is None else 4 * config.dim * self.readout.travelling * self.readout.joins
        return (
            self.stem.flop_count(patches)
            + sum(
                block.flop_count(patches + builder.prefix_tokens(config, index))
                for index, block, _ in self.stages()
            )
            + self.position.flop_count(config.depth)
            - late
            + self.readout.flop_count(patches)
            + self.norm.flop_count(read)
            + (0 if self.head_scale is None else self.head_scale.flop_count(len(heads)))
            + sum(linear_flops(head, 1) for head in heads)
        )


def take_indices(indices: int | Sequence[int] | None, depth: int) -> set[int]:
    """The chosen blocks as non-negative numbers."""
    if indices is None:
        return set(range(depth))
    chosen = list(range(depth))[-indices:] if isinstance(indices, int) and indices > 0 else indices
    if isinstance(chosen, int) or any(not -depth <= index < depth for index in chosen):
        raise ConfigError(
            f"forward_intermediates: indices={indices} leave the blocks 0-{depth - 1} of this model"
        )
    return {index % depth for index in chosen}


def create_model(
    name: str,
    *,
    num_classes: int = 1000,
    image_size: int | None = None,
    weights: str | Path | None = None,
    **overrides: Any,
) -> ViT:
    """Build a model by name.

    Args:
        name: One of `list_models()`.
        num_classes: Outputs of the classifier; 0 for none.
        image_size: Side of the images, if not the one in the name.
        weights: A safetensors file, "hf-hub:OWNER/NAME[@REVISION]", or "timm/NAME[@REVISION]" for timm's own weights
            on the Hub.
        **overrides: Any field of `ViTConfig`.

    >>> create_model("cait_xxs24_224", depth=2, norm="dyt").config.norm
    'dyt'
    """
    for option in overrides:
        check_name(option, (*FIELDS, "weights"), "option", "create_model")
    size = {} if image_size is None else {"image_size": image_size}
    model = ViT(model_config(name, num_classes=num_classes, **size, **overrides))
    if weights is not None:
        load_weights(model, weights)
    return model
