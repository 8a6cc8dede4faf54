"""Export models to other runtimes with verification."""

from fathoms.exporting.export import Exported, export_model
from fathoms.exporting.int8 import Judge, Quantised

__all__ = ["Exported", "Judge", "Quantised", "export_model"]
