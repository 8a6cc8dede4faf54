"""Export models to other runtimes with verification."""

from fathoms.exporting.int8 import Judge, Quantised
from fathoms.exporting.verified_export import Exported, export_model

__all__ = ["Exported", "Judge", "Quantised", "export_model"]
