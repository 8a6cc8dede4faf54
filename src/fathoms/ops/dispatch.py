"""Which implementation of an operation runs: chosen, or refused with the reason."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fathoms.errors import BackendError
from fathoms.registry import check_name

Impl = Literal["auto", "triton", "reference"]
IMPLS = get_args(Impl)

# What CUDA allows along a grid's second and third axis.
MAX_PROGRAMS = 65535

HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors (Triton's own TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_no_kernel() -> str | None:
    """The reason why no kernel of any kind can run now, or None if one can."""
    # It would give the tangents of its inputs away without a word.
    if in_forward_mode():
        return "a forward-mode derivative is asked for, which no kernel has"
    # torch.compile cannot trace the question; torch.func inside of what is compiled needs impl="reference".
    if not torch.compiler.is_compiling() and _differentiates_by_function():
        return "torch.func asks for a derivative, which it does not take from an operation with a kernel"
    return None


def in_forward_mode() -> bool:
    """Whether a forward-mode derivative is asked for: torch.func.jvp, or dual numbers."""
    return forward_ad._current_level >= 0


def _differentiates_by_function() -> bool:
    """Whether this is inside torch.func.grad or another function that is built on it, such as jacrev."""
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
    """Bytes of shared memory that a program may have on a CUDA device."""
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
