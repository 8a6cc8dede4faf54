"""The Vision Transformer: a stem, positions, blocks and a read-out, each chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fathoms.errors import ConfigError, ShapeError
from fathoms.models import builder
from fathoms.models.config import ViTConfig
from fathoms.names.registry import check_name
from fathoms.parts.block import Block
from fathoms.parts.init import STD, exempt_from_decay
from fathoms.parts.linear import linear_flops
from fathoms.parts.residuals.transfer import Transfer
from fathoms.parts.tokens.readout import READOUTS
from fathoms.parts.tokens.rope import Rope2d, Rotation


class ViT(nn.Module):
    """A Vision Transformer built from its config: images in, logits out.

    Tokens are in the order queries (cls, distillation), registers, patches.

    >>> vit = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, heads=4, depth=2, num_classes=10))
    >>> vit(torch.randn(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.image_size = config.image_size
        self.num_features = config.dim
        self.grad_checkpointing = False
        # The dtype of the residual stream; None keeps that of the stem, which under autocast is autocast's.
        self.stream_dtype: torch.dtype | None = None
        # What its record or card says beyond the config (name, preprocessing, classes), for the card of
        # `save_pretrained`; empty for a new model.
        self.card: dict[str, Any] = {}
        self.stem = builder.build_stem(config)
        self.position = builder.build_position(config)
        self.registers = nn.Parameter(torch.empty(config.registers, config.dim)) if config.registers else None
        self.blocks = builder.build_blocks(config)
        self.readout = builder.build_readout(config)
        self.norm = builder.build_final_norm(config)
        self.head = builder.build_head(config)
        self.head_dist = builder.build_head(config) if config.distill_token else None
        self.reset_parameters()

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
            exempt_from_decay(self.registers)
        for head in (self.head, self.head_dist):
            if isinstance(head, nn.Linear):
                builder.reset_head(head, self.config)

    @property
    def transfer(self) -> Transfer:
        """Ratios of depth and width to those that the learning rate was tuned at; ones for most residual methods."""
        return builder.config_transfer(self.config)

    @property
    def num_classes(self) -> int:
        """Outputs of the classifier."""
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

    @classmethod
    def from_pretrained(cls, source: str | Path, **overrides: Any) -> ViT:
        """A model from a folder of `save_pretrained` or from the Hub: see `fathoms.models.pretrained`.

        Args:
            source: The folder, a weights file with its card, or hf-hub:OWNER/NAME[@REVISION].
            **overrides: Fields of ViTConfig that leave the weights as they are, such as image_size or drop_path.
        """
        from fathoms.models.pretrained.save_and_load import from_pretrained

        return from_pretrained(source, **overrides)

    def save_pretrained(
        self, folder: str | Path, *, preprocessing: Any = None, classes: Sequence[str] | None = None
    ) -> Path:
        """Write weights and card to a folder; returns the weights file.

        Args:
            folder: Made if it is not there; files of an earlier save are replaced.
            preprocessing: `crop_pct`, `interpolation`, `mean` and `std` of its images, as a table or a
                `Preprocessing`; None takes those that `load_run` or `from_pretrained` found.
            classes: Names of the outputs; None takes those that were found.
        """
        from fathoms.models.pretrained.save_and_load import save_pretrained

        return save_pretrained(self, folder, preprocessing=preprocessing, classes=classes)

    def push_to_hub(
        self,
        repo: str,
        *,
        public: bool = False,
        preprocessing: Any = None,
        classes: Sequence[str] | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes to OWNER/NAME on the Hub; returns hf-hub:OWNER/NAME@COMMIT."""
        from fathoms.models.pretrained.save_and_load import push_to_hub

        return push_to_hub(self, repo, public=public, preprocessing=preprocessing, classes=classes)

    def get_classifier(self) -> nn.Module:
        """The classifier that reads the class token."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by a new one of `num_classes` outputs; 0 for none."""
        self.config = self.config.replace(num_classes=num_classes)
        self.card = {name: value for name, value in self.card.items() if name != "classes"}
        like = self._home()
        self.head = builder.build_head(self.config).to(**like)
        if self.head_dist is not None:
            self.head_dist = builder.build_head(self.config).to(**like)

    def _home(self) -> dict[str, Any]:
        """Device and dtype of the model, for new modules."""
        like = next(self.stem.parameters())
        return {"device": like.device, "dtype": like.dtype}

    def embed(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        """The tokens that enter the first block."""
        self._check_images(images)
        tokens = self.stem(images)
        if self.stream_dtype is not None:
            tokens = tokens.to(self.stream_dtype)
        tokens = self.stem.after_position(self.position(tokens))
        if self.registers is not None:
            registers = self.registers.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
            tokens = torch.cat([registers, tokens], dim=1)
        return self.entering(0, tokens)

    def _check_images(self, images: Tensor) -> None:
        size, channels = self.image_size, self.config.in_channels
        if images.ndim != 4:
            shape = tuple(images.shape)
            raise ShapeError(f"images have the shape {shape}; give a batch (B, {channels}, {size}, {size})")
        height, width = images.shape[-2:]
        if (height, width) == (size, size):
            return
        if images.shape[1] == height == size and width == channels:
            raise ShapeError(
                f"images have their {channels} channels last; give (B, {channels}, {size}, {size})"
            )
        raise ShapeError(
            f"images are {height}x{width}, the model takes {size}x{size}; resize them or build the model "
            f"with image_size={height}"
        )

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
        """The tokens after the last block."""
        tokens = self.embed(images)
        for index, block, rotation in self.stages():
            tokens = self.entering(index + 1, self.run(block, tokens, rotation))
        return tokens

    def forward_heads(self, tokens: Float[Tensor, "B N D"]) -> tuple[Tensor, ...]:
        """The logits of each head: one, or with a distillation token two."""
        pooled = self.readout.pool(tokens, self.config.registers)
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
