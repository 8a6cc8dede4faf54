"""A product added to what is there in one pass over it, x + a b + bias: reference here, the fast form in cublas.py."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fathoms.errors import ShapeError
from fathoms.ops.dispatch import choose, why_no_kernel

Form = Literal["auto", "cublas", "reference"]

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# Numbers of 16 bits are read 16 bytes at a time, so rows begin at multiples of those.
MULTIPLE = 8


def add_product(
    x: Float[Tensor, "M N"],
    a: Float[Tensor, "M K"],
    b: Float[Tensor, "K N"],
    bias: Float[Tensor, " N"] | None = None,
    *,
    impl: Form = "auto",
) -> Float[Tensor, "M N"]:
    """A linear whose output joins the stream: x + a b + bias.

    torch writes a b, reads it again with x and writes the sum; or it copies x first and lets cuBLAS add to the copy.
    "cublas" lets cuBLAS read x while it writes the sum, which is rounded once instead of twice.

    Args:
        b: May be a transposed view, as a linear's weight is.
        impl: "cublas", "reference", or "auto": cuBLAS where it can run. `why_not_cublas` tells why "auto" takes the
            reference.
    """
    check_shapes(x, a, b, bias)
    if choose("add_product", impl, {"cublas": why_not_cublas(x, a, b, bias)}) == "reference":
        return add_product_reference(x, a, b, bias)
    # Its module registers an operation with torch, which nobody needs who does not call it.
    from fathoms.ops.cublas import cublas_add_product

    return cublas_add_product(x, a, b, bias)


def add_product_reference(
    x: Float[Tensor, "M N"],
    a: Float[Tensor, "M K"],
    b: Float[Tensor, "K N"],
    bias: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "M N"]:
    """The same in plain torch."""
    return x + (a @ b if bias is None else torch.addmm(bias, a, b))


def why_not_cublas(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> str | None:
    """The reason why `impl="auto"` would run the reference, or None if it would run cuBLAS."""
    if reason := why_no_kernel():
        return reason
    if not x.is_cuda:
        return f"x is on {x.device.type}, not on a CUDA device"
    others = [part for part in (a, b, bias) if part is not None]
    if any(part.device != x.device for part in others):
        return "x and the others are on different devices"
    if any(is_traceable_wrapper_subclass(part) for part in (x, *others)):
        return "x or another is more than a plain tensor"
    if x.dtype not in KERNEL_DTYPES or any(part.dtype != x.dtype for part in others):
        return "x, a, b and bias are not all bfloat16 or all float16"
    if not all(b.shape) or any(size % MULTIPLE for size in b.shape):
        return f"b is {tuple(b.shape)}, cuBLAS is fast for multiples of {MULTIPLE}"
    from fathoms.ops.cublas import why_not_library

    return why_not_library()


def check_shapes(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """Refuse what cannot be multiplied and added; a bias serves every row, and nothing is broadcast."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ShapeError(f"add_product: a is {tuple(a.shape)} and b {tuple(b.shape)}; give (M, K) and (K, N)")
    shape = (a.shape[0], b.shape[1])
    if x.shape != shape:
        raise ShapeError(f"add_product: x is {tuple(x.shape)}; give {shape}, the shape of the product")
    if bias is not None and bias.shape != shape[1:]:
        raise ShapeError(f"add_product: bias is {tuple(bias.shape)}; give ({shape[1]},)")
