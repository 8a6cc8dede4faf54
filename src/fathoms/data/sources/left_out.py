"""Files of a data set that are not taken: counted, and named by kind."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from fathoms.errors import printable

MANIFEST_NAME = "fathoms-manifest.json"
OUTSIDE_OF_CLASSES = "image outside of a class folder"
_SHOWN = 6
_LONGEST = 60


class LeftOut:
    """Counts of what was not taken, by kind, with the first name of each.

    What lies outside of all splits is counted with the first of them.

    >>> left = LeftOut()
    >>> left.add_file("train/ape/notes.txt")
    >>> left.add_file("train/ape/more.txt")
    >>> left.describe()
    'left out: 2 × .txt (train/ape/notes.txt …)'
    """

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, name: str, count: int = 1) -> None:
        """Count `count` things of a kind, the first of which is called `name`."""
        before, first = self.kinds.get(kind, (0, name))
        self.kinds[kind] = (before + count, first)

    def add_file(self, name: str) -> None:
        """Count a file by its suffix."""
        path = PurePosixPath(name)
        self.add(
            "hidden file" if path.name.startswith(".") else path.suffix.lower() or "file without a suffix",
            name,
        )

    def add_all(self, other: LeftOut) -> None:
        """Count what another split left out, too."""
        for kind, (count, first) in other.kinds.items():
            self.add(kind, first, count)

    def count(self, kind: str) -> int:
        """How many of a kind."""
        return self.kinds.get(kind, (0, ""))[0]

    def to_json(self) -> dict[str, Any]:
        """Count and first name by kind."""
        return {kind: {"count": count, "first": first} for kind, (count, first) in self.kinds.items()}

    def describe(self) -> str:
        """All kinds in a line, the most frequent first; empty if everything was taken."""
        ordered = sorted(self.kinds.items(), key=lambda item: (-item[1][0], item[0]))
        parts = []
        for kind, (count, first) in ordered[:_SHOWN]:
            example = f"{_short(first)} …" if count > 1 else _short(first)
            parts.append(f"{count} × {_short(kind)} ({example})")
        rest = sum(count for _, (count, _) in ordered[_SHOWN:])
        parts += [f"{rest} × other kinds"] if rest else []
        return "left out: " + ", ".join(parts) if parts else ""


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else f"…{shown[1 - _LONGEST :]}"


def beside(folder: Path, taken: set[str]) -> LeftOut:
    """Contents of a folder other than the files that are taken by name, and the manifest."""
    left = LeftOut()
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in taken:
            left.add("folder", f"{entry.name}/")
        elif entry.name not in taken | {MANIFEST_NAME}:
            left.add_file(entry.name)
    return left


def left_out_of(*sources: Any) -> LeftOut:
    """Files that the readers of these splits did not take; a part of a split stands for the whole of it."""
    total = LeftOut()
    whole = {id(source): source for source in (getattr(split, "source", split) for split in sources)}
    for source in whole.values():
        total.add_all(getattr(source, "left_out", LeftOut()))
    return total
