"""Reports of swap and fold: rows as plain data, a text table and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fathoms.text_table import aligned


def number(value: float | None) -> str:
    """Three digits, or an empty cell for None."""
    return "" if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class SwapRow:
    """One swapped norm.

    Args:
        name: Path in the model.
        old: Class of the old norm.
        new: Name of the new norm.
        parameters: Number of its parameters, before and after.
        fit_error: Relative error of the new norm's outputs on the batches; None without batches.
        note: Which parameters of the old norm have no place in the new one.
    """

    name: str
    old: str
    new: str
    parameters: tuple[int, int]
    fit_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class SwapReport:
    """The result of `swap_norms`.

    Args:
        how: "keep", "reset" or "calibrate".
        rows: One for each site, in the order of the modules.
        output_change: Largest difference of the model's output over its largest value, on the batches given.
        notes: What the swap did not reach, and what the comparison did not prove.
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
        """One line for each site, then the change of the output."""
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
        """The report as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class FoldRow:
    """One scale or shift that was folded.

    Args:
        name: Its parameters.
        into: The weights that took it in.
        became: "removed", "statistics only", or "set to one" where the model's own code multiplies by it.
        operations: Elementwise operations that no longer run, in one forward pass.
    """

    name: str
    into: tuple[str, ...]
    became: str
    operations: int


@dataclass(frozen=True)
class FoldReport:
    """The result of `fold`.

    Args:
        rows: The parts that were folded, in the order of folding.
        left: Parameters of parts that stay, each with the reason.
        parameters: Number of the model's parameters, before and after.
        drop_paths: Number of stochastic-depth modules that were removed.
        difference: Largest difference of the output over its largest value; None if it was not checked.
        notes: What the comparison did not prove.
    """

    rows: tuple[FoldRow, ...]
    left: tuple[tuple[str, str], ...]
    parameters: tuple[int, int]
    drop_paths: int
    difference: float | None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[FoldRow]:
        return iter(self.rows)

    @property
    def operations(self) -> int:
        """Elementwise operations saved in one forward pass."""
        return sum(row.operations for row in self.rows)

    def table(self) -> str:
        """One line for each part, folded or left, then the savings and the difference."""
        rows = [(row.name, ", ".join(row.into), row.became) for row in self.rows]
        rows += [(name, "left", reason) for name, reason in self.left]
        lines = [f"{len(self.rows)} parts folded, {len(self.left)} left, {self._savings()}"]
        if not self.rows:
            lines.append("nothing was left to fold")
        if self.difference is not None:
            lines.append(f"output differs by {self.difference:.2g} of its largest value")
        return "\n".join([aligned(("part", "into", "became"), rows), *lines, *self.notes])

    def _savings(self) -> str:
        fewer = self.parameters[0] - self.parameters[1]
        if fewer >= 0:
            return f"{self.operations} operations and {fewer} parameters saved"
        return f"{self.operations} operations saved, {-fewer} parameters added: biases where there were none"

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**asdict(self), "operations": self.operations}
