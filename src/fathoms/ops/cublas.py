"""x + a b + bias as one call of cuBLASLt, and as a torch custom op.

The library has the form D = A B + C, which reads C while it writes D; torch calls it only with C and D in one place.
It is the library that torch itself has loaded, and its functions are called here through ctypes. cuBLAS counts in
columns, so it is told of transposes: Dᵀ = Bᵀ Aᵀ + Cᵀ.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathoms.errors import BackendError
from fathoms.ops.add_product import add_product_reference, check_shapes

# Names and numbers of cublasLt.h and library_types.h.
COMPUTE_32F, R_32F = 68, 0
TYPES = {torch.float16: 2, torch.bfloat16: 14}
TURN_FIRST, TURN_SECOND, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
EPILOGUE_BIAS = 4
MAX_WORKSPACE, REDUCTIONS, ALIGNMENT_OF_FIRST = 1, 3, 5
# Sums of parts, where a product is cut along K, are kept in float32 and added in order.
REDUCE_IN_FLOAT32 = 2

# What torch gives cuBLASLt on a large GPU, and what a pointer has at most of alignment as far as cuBLAS is concerned.
WORKSPACE, MAX_ALIGNMENT = 2**25, 256
BIAS_ALIGNMENT = 16

INSTEAD = 'use impl="reference", or where it was compiled sums="separate"'

_ONE = ctypes.c_float(1.0)
# A plan's pointer to the bias is set and used in two calls.
_LOCK = threading.Lock()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library that torch uses, which importing torch has loaded; None where torch has none."""
    if torch.version.cuda is None:
        return None
    with contextlib.suppress(OSError):
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    return None


# A constant to torch.compile, which cannot look into ctypes.
@torch.compiler.assume_constant_result
def why_not_library() -> str | None:
    """The reason why cuBLASLt cannot be called, or None if it can."""
    return "torch has no cuBLASLt here" if _library() is None else None


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise BackendError(f"add_product: {name} failed with status {status}; {INSTEAD}")


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Matrix(NamedTuple):
    """How a matrix lies in memory: by rows, or turned, by columns; how far one is from the next, and its alignment."""

    rows: int
    columns: int
    turned: bool
    stride: int
    alignment: int

    @classmethod
    def by_rows(cls, x: Tensor) -> Matrix:
        """That of a contiguous tensor."""
        rows, columns = x.shape
        return cls(rows, columns, False, columns, _alignment(x))

    @classmethod
    def of(cls, x: Tensor) -> Matrix | None:
        """That of any tensor, None where neither its rows nor its columns lie together."""
        (rows, columns), (down, across) = x.shape, x.stride()
        if across == 1 and down >= columns:
            return cls(rows, columns, False, down, _alignment(x))
        if down == 1 and across >= rows:
            return cls(rows, columns, True, across, _alignment(x))
        return None


class Sum(NamedTuple):
    """What a call is chosen by."""

    device: int
    dtype: torch.dtype
    a: Matrix
    b: Matrix
    x: Matrix
    y: Matrix
    biased: bool


class Plan:
    """A sum described to cuBLASLt, and the algorithm that it chose."""

    def __init__(self, sum_: Sum) -> None:
        self.product = self._make("cublasLtMatmulDesc", COMPUTE_32F, R_32F)
        self._set(TURN_FIRST, ctypes.c_int32(sum_.b.turned))
        self._set(TURN_SECOND, ctypes.c_int32(sum_.a.turned))
        if sum_.biased:
            self._set(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
            # The choice depends on the alignment of a bias, so until there is one, an address stands for it.
            self._set(BIAS_POINTER, ctypes.c_void_p(BIAS_ALIGNMENT))
        order = (sum_.b, sum_.a, sum_.x, sum_.y)
        self.layouts = [self._layout(matrix, TYPES[sum_.dtype]) for matrix in order]
        self.choice = self._choose([matrix.alignment for matrix in order])

    def _make(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _call(f"{kind}Create", ctypes.byref(made), *arguments)
        weakref.finalize(self, getattr(_library(), f"{kind}Destroy"), made)
        return made

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.product, attribute, ctypes.byref(value), size)

    def _layout(self, matrix: Matrix, kind: int) -> ctypes.c_void_p:
        # What lies by rows here lies by columns there, and is the transpose.
        across, down = (matrix.rows, matrix.columns) if matrix.turned else (matrix.columns, matrix.rows)
        sizes = ctypes.c_uint64(across), ctypes.c_uint64(down), ctypes.c_int64(matrix.stride)
        return self._make("cublasLtMatrixLayout", kind, *sizes)

    def _choose(self, alignments: list[int]) -> _Choice:
        wish = self._make("cublasLtMatmulPreference")
        wishes = [
            (MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE)),
            (REDUCTIONS, ctypes.c_uint32(REDUCE_IN_FLOAT32)),
        ]
        wishes += [(ALIGNMENT_OF_FIRST + at, ctypes.c_uint32(size)) for at, size in enumerate(alignments)]
        for attribute, value in wishes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            _call("cublasLtMatmulPreferenceSetAttribute", wish, attribute, ctypes.byref(value), size)
        choice, found = _Choice(), ctypes.c_int()
        given = (_handle(), self.product, *self.layouts, wish, 1, ctypes.byref(choice), ctypes.byref(found))
        _call("cublasLtMatmulAlgoGetHeuristic", *given)
        if found.value == 0:
            raise BackendError(f"add_product: cuBLASLt has no algorithm for these sizes; {INSTEAD}")
        return choice

    def run(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """Make y = x + a b + bias on the current stream."""
        workspace = y.new_empty(self.choice.workspace, dtype=torch.uint8)
        first, second, third, fourth = self.layouts
        with _LOCK:
            if bias is not None:
                self._set(BIAS_POINTER, _pointer(bias))
            _call(
                "cublasLtMatmul", _handle(), self.product, ctypes.byref(_ONE), _pointer(b), first, _pointer(a), second,
                ctypes.byref(_ONE), _pointer(x), third, _pointer(y), fourth, ctypes.byref(self.choice.algorithm),
                _pointer(workspace), ctypes.c_size_t(self.choice.workspace),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip


# Sizes come back step after step; whoever varies them does not fill the memory with plans.
_plan: Callable[[Sum], Plan] = functools.lru_cache(maxsize=1024)(Plan)


def _handle() -> ctypes.c_void_p:
    """The handle that torch has of cuBLAS on the current device, which is one of cuBLASLt too."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _alignment(x: Tensor) -> int:
    return min(x.data_ptr() & -x.data_ptr(), MAX_ALIGNMENT)


def _lying(x: Tensor) -> tuple[Tensor, Matrix]:
    """A matrix as cuBLAS can read it, copied if need be, and how it lies."""
    lies = Matrix.of(x)
    if lies is None:
        x = x.contiguous()
    return x, lies or Matrix.by_rows(x)


@torch.library.custom_op("fathoms::add_product", mutates_args=(), device_types="cuda")
def cublas_add_product(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`fathoms.ops.add_product.add_product` through cuBLASLt, contiguous."""
    check_shapes(x, a, b, bias)
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    x = x.contiguous()
    (a, a_lies), (b, b_lies) = _lying(a), _lying(b)
    with torch.cuda.device_of(x):
        lie = a_lies, b_lies, Matrix.by_rows(x), Matrix.by_rows(y)
        plan = _plan(Sum(x.get_device(), x.dtype, *lie, bias is not None))
        plan.run(a, b, x, y, None if bias is None else _aligned(bias))
    return y


def _aligned(bias: Tensor) -> Tensor:
    """The bias where cuBLAS can read 16 bytes of it at a time."""
    bias = bias.contiguous()
    return bias if _alignment(bias) >= BIAS_ALIGNMENT else bias.clone()


@cublas_add_product.register_kernel("cpu")
def _(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """What a graph that was made for a GPU computes without one."""
    check_shapes(x, a, b, bias)
    return add_product_reference(x, a, b, bias).contiguous()


@cublas_add_product.register_fake
def _(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    check_shapes(x, a, b, bias)
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    del output
    _, a, b, bias = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(a, b)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    _, of_a, of_b, of_bias = ctx.needs_input_grad
    return (
        grad,
        grad @ b.mT if of_a else None,
        a.mT @ grad if of_b else None,
        grad.sum(0) if ctx.biased and of_bias else None,
    )


cublas_add_product.register_autograd(_differentiate, setup_context=_save)
