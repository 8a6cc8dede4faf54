"""Values as strict JSON allows them, which has no NaN and no infinity."""

from __future__ import annotations

import math
from typing import TypeVar

T = TypeVar("T")


def finite(value: T) -> T | None:
    """The value; None for NaN and infinity.

    >>> finite(0.5), finite(float("nan")), finite("inf")
    (0.5, None, 'inf')
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value
