"""Fold learned scales and shifts into the matrices next to them: prepare, trace, find, route, absorb, clean."""

from fathoms.surgery.fold.fold import fold
from fathoms.surgery.report import FoldReport, FoldRow

__all__ = ["FoldReport", "FoldRow", "fold"]
