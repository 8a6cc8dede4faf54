"""Exported files, opened with the card next to them: ONNX through onnxruntime, torch.export programs through torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fathoms.errors import WeightsError
from fathoms.evaluate.onnx_model import OnnxModel
from fathoms.evaluate.program_model import ProgramModel
from fathoms.evaluate.training_record import TrainingRecord, record_of_card
from fathoms.models.recorded_hash import check_recorded_hash

# Opener of an exported file by its ending. Weights (.safetensors) are not a program: they are loaded into a model.
RUNTIMES: dict[str, Callable[[Path], Any]] = {".onnx": OnnxModel, ".pt2": ProgramModel}


def file_of_card(checkpoint: str) -> str:
    """The weights or exported file that a card (FILE.json) belongs to; anything but a card as it is."""
    file = Path(checkpoint.removesuffix(".json"))
    # Unlike Path's own methods, this is false for a name too long to exist.
    is_card = checkpoint.endswith(".json") and os.path.isfile(checkpoint)  # noqa: PTH113
    if not is_card or file.suffix not in (".safetensors", *RUNTIMES):
        return checkpoint
    if not file.is_file():
        raise WeightsError(f"{checkpoint}: is the card of {file.name}, which is not next to it; fetch both")
    return str(file)


def exported_file(checkpoint: str) -> Path | None:
    """The exported file that a path names: the file itself, or the only one in a folder without weights."""
    path = Path(file_of_card(checkpoint))
    if path.suffix in RUNTIMES and os.path.isfile(path):  # noqa: PTH113
        return path
    if not os.path.isdir(path):  # noqa: PTH112
        return None
    if (path / "checkpoints").is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(file for file in path.iterdir() if file.suffix in RUNTIMES)
    if len(found) > 1:
        raise WeightsError(f"{path}: holds {' and '.join(file.name for file in found)}; give one of them")
    return found[0] if found else None


def open_exported(path: Path, trusted: bool) -> tuple[Any, TrainingRecord]:
    """An exported file as a model, and the record in its card; empty where it has none.

    torch's loader of programs unpickles what it cannot read otherwise, and compiles text out of the file: it is called
    for a trusted file only.
    """
    if path.suffix == ".pt2" and not trusted:
        raise WeightsError(
            f"{path}: a torch.export program can run code when it is opened; give --trust-program if it is your own, "
            "or use its ONNX file"
        )
    check_recorded_hash(path, str(path))
    card = path.with_name(f"{path.name}.json")
    return RUNTIMES[path.suffix](path), record_of_card(card) if card.is_file() else TrainingRecord()
