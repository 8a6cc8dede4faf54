"""Average gradients over ranks in a few flat buckets and a fixed order, once an update, where DDP would not do.

DDP reduces from hooks of the backward pass, of which a replayed graph calls none, and in the dtype of what is
differentiated, which rounds the mean where that is a bfloat16 copy. So the ranks exchange the float32 gradients of the
master weights, after the last batch of an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fathoms.errors import ConfigError

BUCKET = 64 << 20
"""Bytes of a bucket: large enough for the full rate of a link, and several for a model that matters."""


def check_statistics(model: nn.Module) -> None:
    """Refuse a model whose statistics the ranks would have to share in the forward pass."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        raise ConfigError(
            "--precision, --launch: BatchNorm's statistics are shared over ranks under autocast and eager only; "
            "use --precision autocast --launch eager"
        )


class GradientBuckets:
    """The gradients of a model's parameters, averaged over all ranks by `reduce`.

    Buckets follow from the order and the sizes of the parameters alone, so the same sums come in the same order in
    every update, and results repeat. Every rank must give gradients to the same parameters.

    Args:
        model: The master weights.
        ranks: Number of ranks.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        check_statistics(model)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.ranks = ranks

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace each gradient by its mean over the ranks; every rank must call this."""
        given = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        under_way = []
        for bucket in buckets(given, BUCKET):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in under_way:
            work.wait()
            flat /= self.ranks
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(own) for part, own in zip(parts, bucket, strict=True)])


def buckets(gradients: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Gradients in runs of one dtype and at most `size` bytes, in their order.

    >>> [len(run) for run in buckets([torch.zeros(3), torch.zeros(3), torch.zeros(9), torch.zeros(1)], size=24)]
    [2, 1, 1]
    """
    run: list[Tensor] = []
    for gradient in gradients:
        full = sum(own.nbytes for own in run) + gradient.nbytes > size
        if run and (full or gradient.dtype != run[0].dtype):
            yield run
            run = []
        run.append(gradient)
    if run:
        yield run
