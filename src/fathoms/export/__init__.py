"""Export models to other runtimes with verification; `convert` and `publish` are in the files of their names."""

from fathoms.export.convert import Converted
from fathoms.export.export import Exported, export_model
from fathoms.export.quantise import Judge, Quantised

__all__ = ["Converted", "Exported", "Judge", "Quantised", "export_model"]
