"""The last evaluation of a run: accuracy by class, confusions, and examples with their predictions."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fathoms.report.records import RunRecord, clipped, listed, number, table

MATRIX = 20
"""Most classes whose confusions are drawn as a matrix."""
SHADES = 8
MOST_CLASSES, MOST_CONFUSIONS, MOST_EXAMPLES = 200, 12, 24
MOST_PNG = 300_000
"""Characters of an image that is shown."""
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class ClassRow:
    """One class: its name, images, accuracy in percent and most frequent mistake."""

    name: str
    images: int
    accuracy: float | None
    mistake: str


@dataclass(frozen=True)
class Evaluated:
    """Classes from the hardest on, the most frequent confusions, and the matrix where it is small enough."""

    split: str
    images: int
    classes: list[ClassRow]
    confusions: list[tuple[str, str, int, float]]
    names: list[str]
    matrix: list[tuple[str, list[tuple[int, int | None]]]]
    left_out: int


def evaluated(run: RunRecord) -> Evaluated | None:
    """The last evaluation; None before there is one."""
    names = [clipped(str(name), 60) for name in listed(run.config.get("classes"))]
    counts = _counts(run.evaluation, len(names))
    if not counts:
        return None
    totals, rows = [0] * len(names), []
    for (true, _), count in counts.items():
        totals[true] += count
    worst: dict[int, tuple[int, int]] = {}
    for (true, guess), count in counts.items():
        if true != guess:
            worst[true] = max(worst.get(true, (0, 0)), (count, guess))
    for index, name in enumerate(names):
        accuracy = 100 * counts.get((index, index), 0) / totals[index] if totals[index] else None
        count, guess = worst.get(index, (0, 0))
        mistake = f"{names[guess]} ({count})" if count else ""
        rows.append(ClassRow(name, totals[index], accuracy, mistake))
    rows.sort(key=lambda row: (row.accuracy is None, row.accuracy or 0.0))
    wrong = sorted(((n, pair) for pair, n in counts.items() if pair[0] != pair[1]), reverse=True)
    confusions = [
        (names[true], names[guess], count, 100 * count / totals[true])
        for count, (true, guess) in wrong[:MOST_CONFUSIONS]
    ]
    return Evaluated(
        clipped(str(run.evaluation.get("split", "held-out")), 20),
        sum(totals),
        rows[:MOST_CLASSES],
        confusions,
        names,
        _matrix(names, counts, totals) if len(names) <= MATRIX else [],
        max(0, len(rows) - MOST_CLASSES),
    )


def _counts(evaluation: dict[str, Any], classes: int) -> dict[tuple[int, int], int]:
    """Images by true and predicted class; entries that make no sense are left out."""
    found: dict[tuple[int, int], int] = {}
    for entry in listed(evaluation.get("confusion")):
        numbers = [value for value in listed(entry) if isinstance(value, int) and 0 <= value < 10**12]
        if len(numbers) == 3 and max(numbers[:2]) < classes and numbers[2]:
            found[numbers[0], numbers[1]] = numbers[2]
    return found


def _matrix(
    names: Sequence[str], counts: dict[tuple[int, int], int], totals: Sequence[int]
) -> list[tuple[str, list[tuple[int, int | None]]]]:
    """A row for each true class: counts, with a shade by their share of the row, None where there are none."""
    return [
        (
            name,
            [
                (count, round(count / totals[true] * (SHADES - 1)) if count else None)
                for count in (counts.get((true, guess), 0) for guess in range(len(names)))
            ],
        )
        for true, name in enumerate(names)
    ]


@dataclass(frozen=True)
class Example:
    """One held-out image: its PNG in base64, its names and its likeliest classes."""

    png: str
    small: bool
    name: str
    label: str
    right: bool
    top: list[tuple[str, str]]


def examples(run: RunRecord) -> list[Example]:
    names = [clipped(str(name), 60) for name in listed(run.config.get("classes"))]
    made = (_example(table(entry), names) for entry in listed(run.examples.get("examples"))[:MOST_EXAMPLES])
    return [example for example in made if example is not None]


def _example(entry: dict[str, Any], names: Sequence[str]) -> Example | None:
    label, side = entry.get("label"), _side(entry.get("png"))
    top = [listed(pair) for pair in listed(entry.get("top"))[:5]]
    known = [pair for pair in top if len(pair) == 2 and _is_class(pair[0], names)]
    if side is None or not _is_class(label, names) or not known:
        return None
    return Example(
        str(entry["png"]),
        side < 64,
        clipped(str(entry.get("name", "")), 120),
        names[int(str(label))],
        known[0][0] == label,
        [(names[one], f"{100 * number(chance, 0.0):.0f} %") for one, chance in known],
    )


def _is_class(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)


def _side(text: Any) -> int | None:
    """The longer side of a PNG in base64; None for anything else, which is never put into the page."""
    if not isinstance(text, str) or len(text) > MOST_PNG or not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", text):
        return None
    try:
        data = base64.b64decode(text, validate=True)
        width, height = struct.unpack(">II", data[16:24])
    except (binascii.Error, struct.error):
        return None
    return max(width, height) if data.startswith(PNG) and max(width, height) <= 512 else None
