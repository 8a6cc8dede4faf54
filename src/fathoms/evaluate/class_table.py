"""Accuracy by class with the most frequent confusions, as text."""

from __future__ import annotations

from collections.abc import Mapping

from fathoms.errors import printable
from fathoms.evaluate.confusion import Confusion
from fathoms.text_table import aligned

ALL, HARDEST = 20, 10
"""Up to `ALL` classes are all listed; of more, the `HARDEST`."""
CONFUSIONS = 2


def class_table(per_class: Mapping[str, float | None], confusion: Confusion) -> str:
    """A line for each class, the hardest first: its images, its accuracy, and what it is most often taken for.

    Args:
        per_class: Accuracy in percent by name; None for a class without images.
        confusion: Images by true class (rows) and predicted class.
    """
    names = list(per_class)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for index, (name, accuracy) in enumerate(per_class.items()):
        if accuracy is None:
            continue
        taken_for = confusion.predicted(index).items()
        wrong = sorted(((count, guess) for guess, count in taken_for if guess != index), reverse=True)
        taken = ", ".join(f"{names[guess]} ({count})" for count, guess in wrong[:CONFUSIONS])
        rows.append((accuracy, (name, f"{confusion.images(index):,}", f"{accuracy:.1f}", taken)))
    rows.sort(key=lambda row: row[0])
    kept = [cells for _, cells in (rows if len(rows) <= ALL else rows[:HARDEST])]
    header = ("class", "images", "top1", "most often taken for")
    text = aligned(header, [tuple(map(printable, cells)) for cells in kept])
    if len(kept) == len(rows):
        return text
    return f"{text}\nand {len(rows) - len(kept)} easier classes; --per-class FILE.csv has all"
