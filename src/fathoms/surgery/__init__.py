"""Change an existing model: swap its norms, fold its scales into its matrices, or run its attention faster.

The functions are `fathoms.swap_norms`, `fathoms.taper`, `fathoms.fold` and `fathoms.accelerate`; `fold` and
`accelerate` are also the names of packages here. Names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathoms.surgery.accelerate import AccelerateReport
    from fathoms.surgery.report import FoldReport, FoldRow, SwapReport, SwapRow
    from fathoms.surgery.swap import NormSite, Taper, find_sites, swap_norms, taper

__all__ = [
    "AccelerateReport",
    "FoldReport",
    "FoldRow",
    "NormSite",
    "SwapReport",
    "SwapRow",
    "Taper",
    "find_sites",
    "swap_norms",
    "taper",
]

_HOMES = {
    "AccelerateReport": "fathoms.surgery.accelerate",
    "FoldReport": "fathoms.surgery.report",
    "FoldRow": "fathoms.surgery.report",
    "NormSite": "fathoms.surgery.swap",
    "SwapReport": "fathoms.surgery.report",
    "SwapRow": "fathoms.surgery.report",
    "Taper": "fathoms.surgery.swap",
    "find_sites": "fathoms.surgery.swap",
    "swap_norms": "fathoms.surgery.swap",
    "taper": "fathoms.surgery.swap",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fathoms.surgery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
