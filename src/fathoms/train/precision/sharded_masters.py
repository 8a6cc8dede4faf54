"""Master weights sharded over ranks (FSDP2), and the whole bfloat16 compute model that each rank keeps of them.

Each rank owns a share of the float32 master weights, of the optimizer's moments and of the EMA, and computes with a
whole model, as without shards: compiled blocks and CUDA graphs work as they do there. Once an update the gradients are
averaged, each rank receiving its share, and the updated weights are gathered: the bytes of one all-reduce. FSDP2's
own forward pass, which gathers block by block for every batch, is left to evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fathoms.train.precision.gradient_buckets import BUCKET, check_statistics
from fathoms.train.precision.master_weights import ComputeCopy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def replica_of(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters of its own and the model's own buffers; make it before the model is sharded."""
    return copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})


@dataclass(frozen=True)
class _Pair:
    """A sharded parameter and its whole counterpart; FSDP2 shards rows, the last ranks may have fewer or none."""

    sharded: DTensor
    whole: nn.Parameter
    rows: int
    """Rows of a share, with the padding that makes all shares equal."""

    @property
    def size(self) -> int:
        """Numbers of a share."""
        return self.rows * self.whole[:1].numel()

    def pad(self, given: Tensor, rows: int) -> Tensor:
        """Rows, followed by zeros where some are missing, as one row of numbers."""
        if len(given) == rows:
            return given.flatten()
        padded = self.whole.new_zeros(rows, *self.whole.shape[1:])
        padded[: len(given)] = given
        return padded.flatten()

    def gradient_on(self, share: Tensor) -> DTensor:
        """The gradient of the sharded parameter, whose numbers lie in `share`."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            share.view(self.rows, *self.whole.shape[1:])[: len(self.sharded.to_local())],
            self.sharded.device_mesh,
            self.sharded.placements,
            shape=self.sharded.shape,
            stride=self.sharded.stride(),
        )


class _Bucket:
    """Pairs whose shares travel together, and the memory of their sharded gradients."""

    def __init__(self, pairs: list[_Pair], ranks: int) -> None:
        self.pairs, self.ranks = pairs, ranks
        self.sizes = [pair.size for pair in pairs]
        self.own = pairs[0].whole.new_zeros(sum(self.sizes))
        shares = zip(pairs, self.own.split(self.sizes), strict=True)
        self.gradients = [pair.gradient_on(share) for pair, share in shares]

    def gather(self) -> None:
        """Fill the whole tensors from the shards."""
        own = torch.cat([pair.pad(pair.sharded.to_local(), pair.rows) for pair in self.pairs])
        every = own.new_empty(self.ranks * len(own))
        dist.all_gather_into_tensor(every, own)
        rows = []
        for pair, share in zip(self.pairs, every.view(self.ranks, -1).split(self.sizes, dim=1), strict=True):
            whole = share.reshape(self.ranks * pair.rows, *pair.whole.shape[1:])
            rows.append(whole[: len(pair.whole)])
        torch._foreach_copy_([pair.whole for pair in self.pairs], rows)

    def reduce(self) -> None:
        """Give the shards their means of the whole gradients, which are cleared."""
        padded = [
            pair.pad(cast(Tensor, pair.whole.grad), self.ranks * pair.rows).view(self.ranks, -1)
            for pair in self.pairs
        ]
        dist.reduce_scatter_tensor(self.own, torch.cat(padded, dim=1).flatten())
        self.own /= self.ranks
        for pair, gradient in zip(self.pairs, self.gradients, strict=True):
            pair.sharded.grad, pair.whole.grad = gradient, None


class ShardedMasters:
    """Moves weights from the shards to whole tensors, and gradients the other way, in flat buckets of a fixed order.

    Every rank must give gradients to the same parameters.

    Args:
        model: The sharded master weights.
        replica: The same parameters, whole, in the same order.
        ranks: Number of ranks.
    """

    def __init__(self, model: nn.Module, replica: nn.Module, ranks: int) -> None:
        check_statistics(model)
        self.ranks = ranks
        pairs = zip(model.parameters(), replica.parameters(), strict=True)
        self.pairs = [
            _Pair(cast("DTensor", sharded), whole, -(-len(whole) // ranks)) for sharded, whole in pairs
        ]
        self._of: dict[tuple[int, ...], list[_Bucket]] = {}

    def _buckets(self, chosen: list[int]) -> list[_Bucket]:
        """The buckets of the pairs with these numbers, in their order."""
        key = tuple(chosen)
        if key not in self._of:
            self._of[key] = [_Bucket(run, self.ranks) for run in self._runs([self.pairs[i] for i in chosen])]
        return self._of[key]

    def _runs(self, pairs: list[_Pair]) -> Iterator[list[_Pair]]:
        """Pairs in runs of one dtype whose whole tensors have at most `BUCKET` bytes; a larger one is alone."""
        run: list[_Pair] = []
        for pair in pairs:
            taken = sum(self.ranks * own.size * own.whole.element_size() for own in (*run, pair))
            if run and (taken > BUCKET or pair.whole.dtype != run[0].whole.dtype):
                yield run
                run = []
            run.append(pair)
        if run:
            yield run

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the whole tensors from the shards of all ranks; every rank must call this."""
        for bucket in self._buckets(list(range(len(self.pairs)))):
            bucket.gather()

    @torch.no_grad()
    def reduce(self) -> None:
        """Give each shard the mean over ranks of its part of the whole gradients, which are cleared."""
        for bucket in self._buckets([i for i, pair in enumerate(self.pairs) if pair.whole.grad is not None]):
            bucket.reduce()


class ShardedCopy(ComputeCopy):
    """The compute model of sharded master weights: a `ComputeCopy` of whole tensors that are gathered once an update.

    Args:
        replica: The whole float32 tensors.
        masters: Fills them.
    """

    def __init__(self, replica: nn.Module, masters: ShardedMasters) -> None:
        self.sharded = masters
        super().__init__(replica)
        for stack in self.stacks:
            stack.adopt_weights()

    def push_weights(self) -> None:
        """Gather the master weights, and cast them into the copies."""
        self.sharded.gather()
        super().push_weights()
