"""What an operation did to a model, row by row, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fathoms.text_table import aligned


def number(value: float | None) -> str:
    """Three digits, or nothing where there is no number."""
    return "" if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class SwapRow:
    """One site: what stood there, what stands there now.

    Args:
        name: Path in the model.
        old: Class of the norm that was taken out.
        new: Name of the norm in its place.
        parameters: Numbers learned there, before and after.
        fit_error: What the new norm misses of the old one's output, relative, where batches were given.
        note: What could not be carried over.
    """

    name: str
    old: str
    new: str
    parameters: tuple[int, int]
    fit_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class SwapReport:
    """What `swap_norms` did.

    Args:
        how: "keep", "reset" or "calibrate".
        rows: One for each site, in the order of the modules.
        output_change: Largest difference of the model's output over its largest value, on the batches given.
        notes: What is worth knowing beyond the sites.
    """

    how: str
    rows: tuple[SwapRow, ...]
    output_change: float | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SwapRow]:
        return iter(self.rows)

    def table(self) -> str:
        """One line for each site, then what changed at the output."""
        header = ("site", "old", "new", "parameters", "fit error", "note")
        rows = [
            (
                row.name,
                row.old,
                row.new,
                f"{row.parameters[0]} -> {row.parameters[1]}",
                number(row.fit_error),
                row.note,
            )
            for row in self.rows
        ]
        lines = [aligned(header, rows), f"{len(self.rows)} norms swapped ({self.how})"]
        if self.output_change is not None:
            lines.append(f"output changed by {self.output_change:.3g} of its largest value")
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)
