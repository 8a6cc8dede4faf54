"""Which implementation of an operation runs: chosen, or refused with the reason."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

from torch import Tensor

from fathoms.errors import BackendError
from fathoms.registry import check_name

Impl = Literal["auto", "triton", "reference"]


def interpreting() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors (Triton's own TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(x: Tensor) -> str | None:
    """The reason why no Triton kernel can run on `x`, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not x.is_cuda and not interpreting():
        return f"x is on {x.device.type}, not on a CUDA device"
    return None


def choose(op: str, impl: Impl, x: Tensor, refusal: str | None = None) -> Literal["triton", "reference"]:
    """Resolve "auto"; an explicit choice is obeyed or refused, never swapped.

    Args:
        refusal: the operation's own reason against its kernel (a size, a dtype), or None.
    """
    check_name(impl, ("auto", "triton", "reference"), "implementation", op)
    if impl == "reference":
        return "reference"
    reason = why_not_triton(x) or refusal
    if impl == "auto":
        return "reference" if reason else "triton"
    if reason:
        raise BackendError(f'{op}: impl="triton" cannot run: {reason}; use impl="auto"')
    return "triton"
