"""The report page of a run: curves, settings, norms by layer."""

from fathoms.report.page import write_report

__all__ = ["write_report"]
