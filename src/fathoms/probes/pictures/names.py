"""Names of the files that `fathoms probe --figures` writes into a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ENDINGS = (".svg", ".png", ".json")
PAGE = "probe.html"
OF_A_MODEL = (
    "depth",
    "depth_after_steps",
    "training",
    "scales",
    "pixel_scale",
    "filters",
    "attention",
    "head_mixing",
)
"""Pictures of one model; those that it does not have are left out."""


def picture_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files of pictures: each as SVG, PNG and JSON."""
    return [folder / f"{name}{ending}" for name in names for ending in ENDINGS]
