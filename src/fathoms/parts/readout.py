"""Read-outs, which pool the tokens into the heads' input: class token, mean, sequence pooling, or class attention.

A read-out acts three times: `start` may put query tokens in front, before the block whose index is `joins`, `finish`
runs after the last one, and `pool` picks the vectors that the heads read, one per head. `read` is `finish` for
logits alone: it leaves out the tokens that `pool` does not look at. What uses parameters is called as a module, of
tensors alone, so that hooks and wrappers of other libraries see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.ops.dispatch import in_dtype
from fathoms.parts.block import ClassBlock
from fathoms.parts.linears import STD
from fathoms.parts.protocols import Readout
from fathoms.registry import Registry


@dataclass(frozen=True)
class Traits:
    """Properties of a read-out that the model builder reads.

    Args:
        travels: Whether its queries go through the blocks in front of the patches.
        queries: Whether it reads query tokens, and so can have a distillation token.
    """

    travels: bool = False
    queries: bool = True


READOUTS: Registry[Readout, Traits] = Registry("readout", default=Traits())


def _prepend(queries: Float[Tensor, "Q D"], tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B M D"]:
    return torch.cat([in_dtype(queries, tokens.dtype).expand(tokens.shape[0], -1, -1), tokens], dim=1)


@READOUTS.add("cls", Traits(travels=True))
class ClassToken(nn.Module):
    """Learned query tokens go through the blocks in front of the patches and are read at the end.

    Args:
        dim: Width of a token.
        queries: 1 for the class token, 2 with DeiT's distillation token after it.
        joins: Index of the first block that the queries go through; CaiT's ablation inserts them late.
        placed: Whether each query has a learned position besides, as in ViT and DeiT. The sum is what counts, but
            an adaptive optimizer moves two addends twice as fast as one parameter.

    >>> readout = ClassToken(192)
    >>> tokens = readout.start(torch.randn(2, 196, 192))
    >>> tokens.shape, readout.read(tokens, registers=0).shape
    (torch.Size([2, 197, 192]), torch.Size([2, 1, 192]))

    Papers: Dosovitskiy et al. 2020, arXiv:2010.11929; Touvron et al. 2020, arXiv:2012.12877 and 2103.17239.
    """

    exempt_from_decay = ("queries", "positions")

    def __init__(self, dim: int, queries: int = 1, joins: int = 0, placed: bool = False) -> None:
        super().__init__()
        self.travelling, self.joins = queries, joins
        self.queries = nn.Parameter(torch.empty(queries, dim))
        self.positions = nn.Parameter(torch.empty(queries, dim)) if placed else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start queries and positions from the truncated normal; a class token with a position at almost zero."""
        nn.init.trunc_normal_(self.queries, std=STD)
        if self.positions is not None:
            nn.init.trunc_normal_(self.positions, std=STD)
            nn.init.normal_(self.queries[:1], std=1e-6)

    def start(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B M D"]:
        return self(tokens)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B M D"]:
        queries = self.queries if self.positions is None else self.queries + self.positions
        return _prepend(queries, tokens)

    def finish(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B M D"]:
        del registers
        return tokens

    def read(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B Q D"]:
        return self.pool(tokens, registers)

    def pool(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B Q D"]:
        del registers
        return tokens[:, : self.travelling]

    def flop_count(self, num_tokens: int) -> int:
        return 0 * num_tokens


@READOUTS.add("mean_cls", Traits(travels=True, queries=False))
class MeanBesideClassToken(ClassToken):
    """The norm of the patches' mean; a class token goes through the blocks too, and is not read.

    timm's global_pool="avg" with a class token and fc_norm, which MAE's fine-tuning and DyT's own ViTs use.

    >>> MeanBesideClassToken(192).pool(torch.randn(2, 197, 192), registers=0).shape
    torch.Size([2, 1, 192])

    Papers: He et al. 2021, arXiv:2111.06377; Zhu et al. 2025, arXiv:2503.10622.
    """

    def __init__(self, dim: int, queries: int = 1, joins: int = 0, placed: bool = False) -> None:
        if queries != 1:
            raise ConfigError(
                f"readout 'mean_cls' has no query tokens that it reads, and queries={queries} asks for more than one"
            )
        super().__init__(dim, queries, joins, placed)

    def finish(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B M D"]:
        """The mean in front of all tokens, so that the final norm acts on the mean itself."""
        return torch.cat([self.read(tokens, registers), tokens], dim=1)

    def read(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B 1 D"]:
        return tokens[:, self.travelling + registers :].mean(dim=1, keepdim=True)

    def pool(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B 1 D"]:
        """The mean, which `finish` and `read` put first."""
        del registers
        return tokens[:, :1]

    def flop_count(self, num_tokens: int) -> int:
        return self.queries.shape[1] if num_tokens else 0


class _PooledTokens(nn.Module):
    """A read-out without query tokens, which pools all patches."""

    travelling = joins = 0
    name = ""

    def __init__(self, dim: int, queries: int = 1) -> None:
        super().__init__()
        if queries != 1:
            raise ConfigError(
                f"readout {self.name!r} has no query tokens, and queries={queries} asks for more than one"
            )
        self.dim = dim

    def start(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return tokens

    def finish(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B N D"]:
        del registers
        return tokens

    def read(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B N D"]:
        """All tokens, since the norm comes before the mean."""
        return self.finish(tokens, registers)


@READOUTS.add("mean", Traits(queries=False))
class MeanToken(_PooledTokens):
    """The mean of the patch tokens after the final norm; registers are left out.

    >>> MeanToken(192).pool(torch.randn(2, 196, 192), registers=0).shape
    torch.Size([2, 1, 192])
    """

    name = "mean"

    def pool(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B 1 D"]:
        return self(tokens[:, registers:])

    def forward(self, patches: Float[Tensor, "B N D"]) -> Float[Tensor, "B 1 D"]:
        return patches.mean(dim=1, keepdim=True)

    def flop_count(self, num_tokens: int) -> int:
        return self.dim if num_tokens else 0


@READOUTS.add("seqpool", Traits(queries=False))
class SequencePool(_PooledTokens):
    """CCT's sequence pooling: softmax(w x + b over the patches) as weights of their mean; registers are left out.

    >>> SequencePool(192).pool(torch.randn(2, 196, 192), registers=0).shape
    torch.Size([2, 1, 192])

    Paper: Hassani et al. 2021, arXiv:2104.05704.
    """

    name = "seqpool"

    def __init__(self, dim: int, queries: int = 1) -> None:
        super().__init__(dim, queries)
        self.score = nn.Linear(dim, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the weights from the truncated normal, and the bias, which the softmax cancels, at zero."""
        nn.init.trunc_normal_(self.score.weight, std=STD)
        nn.init.zeros_(self.score.bias)

    def pool(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B 1 D"]:
        return self(tokens[:, registers:])

    def forward(self, patches: Float[Tensor, "B N D"]) -> Float[Tensor, "B 1 D"]:
        weights = in_dtype(self.score(patches).softmax(dim=1).transpose(-2, -1), patches.dtype)
        return in_dtype(weights @ patches, patches.dtype)

    def flop_count(self, num_tokens: int) -> int:
        return num_tokens * (2 * self.dim + 1)


@READOUTS.add("class_attention")
class ClassAttentionReadout(nn.Module):
    """CaiT's second stage: the queries come after the last block and read the patches in a few more.

    Registers are dropped before it.

    Args:
        dim: Width of a token.
        heads: Heads of the class attention.
        queries: 1 for the class token, 2 with a distillation token after it.
        early: Whether the distillation token goes through all blocks in front of the patches, as in DeiT, and comes
            into this stage as they left it; CaiT's paper does not say which, and its code has no such token.
        class_attention_depth: Number of class-attention blocks.
        depth: Number of blocks before this stage; residual methods use it, and block indices continue from it.
        **options: As for `Block`.

    >>> readout = ClassAttentionReadout(192, heads=4, queries=1, class_attention_depth=2, depth=24)
    >>> readout.read(torch.randn(2, 196, 192), registers=0).shape
    torch.Size([2, 1, 192])

    Paper: Touvron et al. 2021, arXiv:2103.17239.
    """

    exempt_from_decay = ("queries", "distill")
    joins = 0

    def __init__(
        self,
        dim: int,
        heads: int,
        queries: int,
        class_attention_depth: int,
        depth: int,
        early: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.heads_read, self.travelling = queries, int(early)
        # These blocks are as many at any depth of the network, so a rule by depth leaves them as they are.
        options = {**options, "base_depth": depth}
        self.queries = nn.Parameter(torch.empty(queries - self.travelling, dim))
        self.distill = nn.Parameter(torch.empty(1, dim)) if early else None
        self.blocks = nn.ModuleList(
            ClassBlock(dim, heads, depth=depth, index=depth + offset, **options)
            for offset in range(class_attention_depth)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for token in self.parameters(recurse=False):
            nn.init.trunc_normal_(token, std=STD)

    def start(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B M D"]:
        """Put an early distillation token in front; the other queries come later."""
        return tokens if self.distill is None else self(tokens, start=True)

    def finish(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B M D"]:
        """Let the queries read the patches; they come back in front of them."""
        return torch.cat([self.read(tokens, registers), tokens[:, self.travelling + registers :]], dim=1)

    def read(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B Q D"]:
        if registers:
            early, patches = tokens[:, : self.travelling], tokens[:, self.travelling + registers :]
            tokens = torch.cat([early, patches], dim=1) if self.travelling else patches
        return self(tokens)

    def forward(self, tokens: Float[Tensor, "B N D"], start: bool = False) -> Float[Tensor, "B M D"]:
        """The queries, after they have read the patches; at the start, the patches behind an early token."""
        if start:
            return _prepend(cast(Tensor, self.distill), tokens)
        early, patches = tokens[:, : self.travelling], tokens[:, self.travelling :]
        queries = _prepend(self.queries, early)
        for block in self.blocks:
            queries = block(queries, patches)
        return queries

    def pool(self, tokens: Float[Tensor, "B N D"], registers: int) -> Float[Tensor, "B Q D"]:
        del registers
        return tokens[:, : self.heads_read]

    def flop_count(self, num_tokens: int) -> int:
        blocks = cast(Iterable[ClassBlock], self.blocks)
        return sum(block.flop_count(num_tokens, self.heads_read) for block in blocks)
