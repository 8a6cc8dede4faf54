"""Report pages of runs and comparisons, written to a file or served on this machine."""

from fathoms.report.page import write_report

__all__ = ["write_report"]
