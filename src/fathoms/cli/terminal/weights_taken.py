"""The weights that a command took out of a run folder, and a preprocessing it assumed, on standard error."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fathoms.errors import printable

if TYPE_CHECKING:
    from fathoms.evaluate.preprocessing import Preprocessing


def say_assumed(checkpoint: str, preprocessing: Preprocessing, remedy: str) -> None:
    """Name the preprocessing of a checkpoint that does not record its own; after the work, so a refusal is one line."""
    print(printable(preprocessing.assumed(checkpoint, remedy)), file=sys.stderr)


def say_weights(checkpoint: str, source: str) -> None:
    """Name the weights file that stands for a folder, and those of the last epoch where the best were taken."""
    folder, file = Path(checkpoint), Path(source)
    if not folder.is_dir():
        return
    line = f"weights: {source}"
    if file.parent == folder / "checkpoints" / "best":
        last = folder / "checkpoints" / "last"
        line += ", of the best epoch on val"
        line += f"; for the last, give {shlex.quote(str(last))}" if last.is_dir() else ""
    print(printable(line), file=sys.stderr)
