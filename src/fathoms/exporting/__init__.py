"""Export models to other runtimes with verification."""

from fathoms.exporting.export import Exported, Judge, Quantised, export_model

__all__ = ["Exported", "Judge", "Quantised", "export_model"]
