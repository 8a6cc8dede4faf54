"""The `repr` of a part: the arguments that it was built with, as torch's own modules do."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def describe(part: nn.Module) -> str:
    """The constructor's arguments that a part keeps: `768, init_value=1e-4` of `LayerScale(768, init_value=1e-4)`."""
    _, *names = inspect.signature(type(part).__init__).parameters
    kept = {name: getattr(part, name, None) for name in names}
    own = next(part.parameters(recurse=False), None)
    if names and names[0] == "dim" and kept["dim"] is None and own is not None:
        kept["dim"] = own.shape[-1]
    shown = {
        name: plain(value) for name, value in kept.items() if isinstance(value, bool | int | float | str)
    }
    return ", ".join(text if name == names[0] else f"{name}={text}" for name, text in shown.items())


def plain(value: Any) -> str:
    """A value as it is written in code: 1e-4, 0.5, 'normal'.

    >>> plain(1e-4), plain(0.5), plain(0.0), plain("ones")
    ('1e-4', '0.5', '0.0', "'ones'")
    """
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.6e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return repr(value)


def prints_nothing(value: Any) -> bool:
    """Whether something is a module's class without an `extra_repr` of its own."""
    return (
        isinstance(value, type) and issubclass(value, nn.Module) and value.extra_repr is nn.Module.extra_repr
    )
