"""A join and the norm behind it as torch custom ops: one pass over the tokens forward, one backward."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fathoms.ops.triton.add_norm_kernels import backward_kernel, forward_kernel
from fathoms.ops.triton.around import launch

# Numbers per token that a norm measures and the backward pass needs; the other kinds look at single elements.
MEASURED = {"layernorm": 2, "rmsnorm": 1, "scalenorm": 1}
# Channels at a time where a kind looks at single elements: a whole line of memory, and a divisor of most widths.
COLUMNS = 64


class Tile(NamedTuple):
    """Tokens at a time, warps, stages of the pipeline, and programs per multiprocessor (backward only)."""

    rows: int
    warps: int
    stages: int = 1
    programs: int = 1


# By the padded width of what a program holds: as many elements as keep a thread busy, few enough for its registers.
FORWARD = {64: Tile(16, 4), 256: Tile(4, 2), 512: Tile(2, 2), 1024: Tile(1, 2)}
BACKWARD = {64: Tile(16, 4, 1, 4), 256: Tile(2, 1, 1, 12), 512: Tile(2, 2, 1, 6), 1024: Tile(1, 2, 1, 6)}


def fused_add_norm(
    x: Tensor,
    branch: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    shift: Tensor | None,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`fathoms.ops.add_norm` in one kernel; every parameter has one element per channel, maybe all the same one."""
    stream, normed, _ = add_norm_forward(x, branch, scale, weight, bias, alpha, shift, kind, eps)
    return stream, normed


@torch.library.custom_op("fathoms::add_norm", mutates_args=())
def add_norm_forward(
    x: Tensor,
    branch: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    shift: Tensor | None,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream, normed, and what the norm measured of each token, in float32."""
    stream, normed, measured = _outputs(x, branch, kind)
    x, branch = _rows(x), _rows(branch)
    count, dim = x.shape
    columns = _columns(dim, kind)
    tile = _tile(FORWARD, columns)
    parameters = scale, weight, bias, alpha, shift
    launch(
        forward_kernel, (triton.cdiv(count, tile.rows), triton.cdiv(dim, columns)),
        x, branch, *parameters, stream, normed, measured,
        count, x.stride(0), branch.stride(0), *_strides(*parameters), eps,
        D=dim, C=columns, R=tile.rows, KIND=kind, num_warps=tile.warps,
    )  # fmt: skip
    return stream, normed, measured


@add_norm_forward.register_fake
def _(x: Tensor, branch: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, branch, rest[-2])


@torch.library.custom_op("fathoms::add_norm_backward", mutates_args=())
def add_norm_backward(
    of_stream: Tensor,
    of_normed: Tensor,
    stream: Tensor,
    measured: Tensor,
    branch: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    shift: Tensor | None,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of stream and branch, and each program's share of those of the parameters. No atomics.

    Without a scale the gradient of the branch is that of the stream, and its own is left empty.
    """
    parameters = scale, weight, bias, alpha, shift
    of_x, of_branch, shares = _gradients(stream, branch, parameters, kind)
    ds, dy, s = _rows(of_stream), _rows(of_normed), _rows(stream)
    f = None if branch is None else _rows(branch)
    count, dim = s.shape
    columns = _columns(dim, kind)
    tile = _tile(BACKWARD, columns)
    share = iter(shares)
    sums = [None if p is None else next(share) for p in parameters]
    read = scale, weight, alpha, shift
    launch(
        backward_kernel, (shares.shape[1], triton.cdiv(dim, columns)),
        ds, dy, s, f, *read, measured, of_x, of_branch, *sums,
        count, ds.stride(0), dy.stride(0), 0 if f is None else f.stride(0), *_strides(*read), eps,
        D=dim, C=columns, R=tile.rows, KIND=kind, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return of_x, of_branch, shares


@add_norm_backward.register_fake
def _(
    _of_stream: Tensor,
    _of_normed: Tensor,
    stream: Tensor,
    _measured: Tensor,
    branch: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(stream, branch, rest[:5], rest[5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, scale, weight, bias, alpha, shift, kind, eps = inputs
    stream, _, measured = output
    ctx.set_materialize_grads(False)
    ctx.dtypes, ctx.kind, ctx.eps = (x.dtype, branch.dtype), kind, eps
    kept = None if scale is None else branch
    ctx.save_for_backward(stream, measured, kept, scale, weight, bias, alpha, shift)


def _differentiate(
    ctx: Any, of_stream: Tensor | None, of_normed: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    stream, measured, branch, *parameters = ctx.saved_tensors
    # Nobody may have read one of the two outputs.
    of_stream = torch.zeros_like(stream) if of_stream is None else of_stream
    of_normed = torch.zeros_like(stream) if of_normed is None else of_normed
    of_x, of_branch, shares = add_norm_backward(
        of_stream, of_normed, stream, measured, branch, *parameters, ctx.kind, ctx.eps
    )
    sums = iter(shares.sum(1).unbind(0))
    of_parameters = [None if p is None else next(sums).to(p.dtype) for p in parameters]
    of_branch = of_x if branch is None else of_branch
    x_dtype, branch_dtype = ctx.dtypes
    return of_x.to(x_dtype), of_branch.to(branch_dtype), *of_parameters, None, None


add_norm_forward.register_autograd(_differentiate, setup_context=_save)


def _outputs(x: Tensor, branch: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, branch.dtype)
    stream, normed = (x.new_empty(x.shape, dtype=dtype) for _ in range(2))
    tokens = x.numel() // x.shape[-1]
    return stream, normed, x.new_empty(MEASURED.get(kind, 0), tokens, dtype=torch.float32)


def _gradients(
    stream: Tensor, branch: Tensor | None, parameters: tuple[Tensor | None, ...], kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = stream.new_empty(stream.shape)
    of_branch = stream.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    learned = sum(p is not None for p in parameters)
    dim = stream.shape[-1]
    columns = _columns(dim, kind)
    programs = _tile(BACKWARD, columns).programs * _multiprocessors(stream.device)
    # As many as run at one time, whichever channels they hold.
    programs = max(1, programs // triton.cdiv(dim, columns))
    return of_x, of_branch, stream.new_empty(learned, programs, dim, dtype=torch.float32)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _columns(dim: int, kind: str) -> int:
    """Channels that one program holds: all of a token, where the token is measured."""
    return triton.next_power_of_2(dim) if kind in MEASURED else min(COLUMNS, triton.next_power_of_2(dim))


def _tile(tiles: dict[int, Tile], columns: int) -> Tile:
    """The cut for the next width that was measured, or the widest."""
    return tiles[min((width for width in tiles if width >= columns), default=max(tiles))]


def _rows(x: Tensor) -> Tensor:
    """`x` as a matrix of tokens with their channels next to each other."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _strides(*parameters: Tensor | None) -> list[int]:
    return [0 if p is None else p.stride(0) for p in parameters]
