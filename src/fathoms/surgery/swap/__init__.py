"""Swap the norms of a model, keeping or refitting their learned scales, at once or gradually."""

from fathoms.surgery.report import SwapReport, SwapRow
from fathoms.surgery.swap.sites import NormSite, find_sites
from fathoms.surgery.swap.swap import swap_norms
from fathoms.surgery.swap.taper import Taper, taper

__all__ = ["NormSite", "SwapReport", "SwapRow", "Taper", "find_sites", "swap_norms", "taper"]
