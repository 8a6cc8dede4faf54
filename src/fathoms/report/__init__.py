"""Report pages of runs and comparisons, each one file."""

from fathoms.report.page import write_report

__all__ = ["write_report"]
