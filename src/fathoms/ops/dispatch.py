"""Implementation of an operation, or the reason why it is refused; its dtypes under autocast; launches of kernels.

Importing this file does not import triton.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fathoms.errors import BackendError
from fathoms.registry import check_name

Impl = Literal["auto", "triton", "reference"]
IMPLS = get_args(Impl)

F = TypeVar("F", bound=Callable[..., Any])

# The limit of CUDA for a grid's second and third axis.
MAX_PROGRAMS = 65535


def constant_to_compiler(function: F) -> F:
    """Mark a function whose result torch.compile may take as a constant, without looking inside.

    This is `torch.compiler.assume_constant_result` without its import of the compiler, which takes longer than
    the rest of torch and which a run that compiles nothing never needs.
    """
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors (Triton's own TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_no_kernel() -> str | None:
    """The reason why no kernel can run now, or None if one can."""
    # A kernel would drop the tangents of its inputs silently.
    if in_forward_mode():
        return "forward-mode derivatives are needed, which no kernel has"
    # torch.compile cannot trace this check; torch.func inside a compiled function needs impl="reference".
    if not torch.compiler.is_compiling() and _differentiates_by_function():
        return "torch.func needs a derivative, which it cannot take from an operation with a kernel"
    return None


def in_forward_mode() -> bool:
    """Whether this runs in forward mode: torch.func.jvp, or dual numbers."""
    return forward_ad._current_level >= 0


def _differentiates_by_function() -> bool:
    """Whether this runs inside torch.func.grad or a function built on it, such as jacrev."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in levels)


def why_not_triton(x: Tensor | torch.device) -> str | None:
    """The reason why no Triton kernel can run on `x`, or on a device; None if one can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if reason := why_no_kernel():
        return reason
    name, device = ("x", x.device) if isinstance(x, Tensor) else ("it", x)
    if device.type != "cuda" and not interpreting():
        return f"{name} is on {device.type}, not on a CUDA device"
    return None


def choose(op: str, impl: str, reason: str | None) -> Literal["triton", "reference"]:
    """Resolve "auto"; an explicit choice is obeyed or refused, never swapped.

    Args:
        reason: Why the kernel cannot run, or None if it can; "auto" then takes the reference.
    """
    check_name(impl, IMPLS, "implementation", op)
    if impl == "reference" or (impl == "auto" and reason):
        return "reference"
    if reason:
        raise BackendError(f'{op}: impl="{impl}" cannot run: {reason}; use impl="auto"')
    return "triton"


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with `x`: autocast's where it is on, except that float64 stays float64."""
    return torch.get_autocast_dtype(x.device.type) if is_on(x) and x.dtype != torch.float64 else x.dtype


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X in a dtype; no operation where it has it already, which `Tensor.to` is to the dispatcher and to tracers."""
    return x if x.dtype == dtype else x.to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses: float32, or float64 of float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """X in float32, or in float64 if it is: for statistics and losses."""
    return in_dtype(x, wide(x.dtype))


def as_written(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products have the dtype of their tensors, also under autocast."""
    return torch.autocast(x.device.type, enabled=False) if is_on(x) else nullcontext()


def is_on(x: Tensor) -> bool:
    """Whether autocast is on for operations with `x`."""
    # There is no autocast for the meta device.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def matmul_options(warps: int, stages: int) -> dict[str, Any]:
    """Compile options of a kernel with matrix products."""
    # Three tf32 products are as exact as float32 and run on the tensor cores; 16-bit inputs ignore this.
    return {"PRECISION": "widened" if interpreting() else "tf32x3", **launch_options(warps, stages)}


def launch_options(warps: int, stages: int) -> dict[str, Any]:
    """Compile options of any kernel."""
    return {
        "num_warps": warps,
        "num_stages": stages,
        # The default of both Triton 3.6 and 3.9, which would warn that it is to change.
        "enable_fp_fusion": True,
    }


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **compiled: Any) -> None:
    """Launch a kernel on the device of its first tensor; to a type checker its parameters are those of the device."""
    # A grid without programs cannot be launched.
    if math.prod(grid) == 0:
        return
    # Triton launches kernels on the current device, which may be another one.
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **compiled)
