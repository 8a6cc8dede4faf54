"""Choose the implementation of an operation, or refuse it with the reason."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fathoms.errors import BackendError
from fathoms.names.registry import check_name

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


@functools.cache
def device_shared_memory(device: int) -> int:
    """Bytes of shared memory that a program can use on a CUDA device."""
    from triton.runtime import driver

    active: Any = driver.active
    return active.utils.get_device_properties(device)["max_shared_mem"]


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
