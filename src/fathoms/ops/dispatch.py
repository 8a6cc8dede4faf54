"""Which implementation of an operation runs: chosen, or refused with the reason."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

from torch import Tensor

from fathoms.errors import BackendError
from fathoms.registry import check_name

Impl = Literal["auto", "triton", "reference"]

HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors (Triton's own TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(x: Tensor) -> str | None:
    """The reason why no Triton kernel can run on `x`, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    if not x.is_cuda and not interpreting():
        return f"x is on {x.device.type}, not on a CUDA device"
    return None


def choose(
    op: str, impl: Impl, x: Tensor, *, refusal: str | None = None, advice: str | None = None
) -> Literal["triton", "reference"]:
    """Resolve "auto"; an explicit choice is obeyed or refused, never swapped.

    Args:
        refusal: the operation's own reason why its kernel cannot run (a size, a dtype), or None.
        advice: its reason why the kernel can run but does not pay; only "auto" follows it.
    """
    check_name(impl, ("auto", "triton", "reference"), "implementation", op)
    if impl == "reference":
        return "reference"
    reason = why_not_triton(x) or refusal
    if impl == "auto":
        return "reference" if reason or advice else "triton"
    if reason:
        raise BackendError(f'{op}: impl="triton" cannot run: {reason}; use impl="auto"')
    return "triton"
