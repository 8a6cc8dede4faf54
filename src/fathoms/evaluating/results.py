"""Classes and results of an evaluation: the labels of ImageNet's robustness sets, tables by class, files.

ImageNet-A, -R and -Sketch are folders named by their classes (200 or 1,000 of the 1,000);
ImageNet-V2's folders are the numbers of the classes; ReaL gives each validation image a list of labels.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fathoms.errors import ConfigError, printable, reason
from fathoms.evaluating.metrics import Confusion
from fathoms.files import inert, write_atomic
from fathoms.registry import nearest
from fathoms.text_table import aligned

# Class names that an error lists.
SHOWN = 6


def match_classes(data: Sequence[str], model: Sequence[str], where: str) -> list[int]:
    """The model's output for each class of a data set: by name, or by number where names are numbers.

    >>> match_classes(["10", "2"], [f"class {number}" for number in range(12)], "v2")
    [10, 2]
    >>> match_classes(["cat", "ant"], ["ant", "bee", "cat"], "r")
    [2, 0]
    """
    position = {name: index for index, name in enumerate(model)}
    if all(name in position for name in data):
        return [position[name] for name in data]
    if all(re.fullmatch(r"\d{1,6}", name, re.ASCII) and int(name) < len(model) for name in data):
        return [int(name) for name in data]
    unknown = next(name for name in data if name not in position)
    near = nearest(unknown, model)
    known = f"the nearest is {near!r}" if near else f"it has {', '.join(map(repr, model[:SHOWN]))}"
    more = "" if near or len(model) <= SHOWN else f" and {len(model) - SHOWN} more"
    raise ConfigError(
        f"{where}: the model has no class {unknown!r}; {known}{more}; give data of its classes, "
        "in folders of their names or numbers"
    )


def class_note(data: Sequence[str], model: Sequence[str], where: str) -> str | None:
    """A line if the classes of a data set are not those that the model was trained on, and yet can be matched."""
    if set(data) == set(model):
        return None
    if set(data) <= set(model):
        return f"{where}: has {len(data)} of the model's {len(model)} classes; the others are not considered"
    return f"{where}: its classes are numbers, and are taken for the model's by their order ({_some(model)})"


def guessed_order(checkpoint: str, data: Sequence[str]) -> str:
    """A line on a model without class names, whose outputs are taken for the data's classes in their order."""
    return f"{checkpoint}: has no class names; its outputs are taken for the data's classes in order: {_some(data)}"


def empty_note(classes: Sequence[str], labels: Iterable[int], where: str) -> str | None:
    """A line if a data set has no images of some of its classes, as one that its training set alone has.

    >>> empty_note(["ant", "bee", "cat"], [0, 2, 2], "set")
    "set: has no images of 1 of its 3 classes ('bee'); the metrics are of the others"
    """
    present = set(labels)
    empty = [name for index, name in enumerate(classes) if index not in present]
    if not empty:
        return None
    share = f"{len(empty)} of its {len(classes)} classes ({_some(empty)})"
    return f"{where}: has no images of {share}; the metrics are of the others"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")


def read_real(path: str | Path) -> dict[int, tuple[int, ...]]:
    """ReaL labels by image number, from 1 as in ILSVRC2012_val_00000001; images without labels are left out."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not a readable ReaL file ({reason(error)})") from error
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(isinstance(label, int) for label in row) for row in rows
    ):
        raise ConfigError(f"{path}: ReaL labels are a list of lists of class numbers; this is not")
    return {number: tuple(row) for number, row in enumerate(rows, start=1) if row}


@runtime_checkable
class Named(Protocol):
    """Images with names, in classes."""

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def where(self, index: int) -> str: ...


def real_of(source: Named, labels: Mapping[int, tuple[int, ...]], where: str) -> dict[int, tuple[int, ...]]:
    """ReaL labels by index of an image in a data set, whose classes they are numbers of."""
    numbers = {index: image_number(source.where(index)) for index in range(len(source))}
    found = {index: labels[number] for index, number in numbers.items() if number in labels}
    if not found:
        raise ConfigError(
            f"{where}: has labels for none of the images; give the validation images of ImageNet"
        )
    largest = max(label for own in found.values() for label in own)
    if largest >= len(source.classes):
        raise ConfigError(
            f"{where}: has class {largest}, the data {len(source.classes)} classes; give the data of all classes"
        )
    return found


def image_number(name: str) -> int:
    """The number at the end of a validation image's name."""
    match = re.search(r"(\d+)\.\w+$", name)
    if match is None:
        raise ConfigError(f"{name}: ReaL labels need a number at the end of the name; this has none")
    return int(match[1])


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


Results = dict[str, dict[str, Any]]


def check_target(flag: str, target: str | None, endings: tuple[str, ...]) -> None:
    """Refuse an output file that cannot be written, before the evaluation starts."""
    if target is None:
        return
    path = Path(target)
    if path.suffix not in endings:
        raise ConfigError(
            f"{flag} {target}: this file is written as {' or '.join(endings)}; change the ending"
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} {target}: its folder cannot be written; create it or choose another")


def _write_csv(target: str, rows: Iterable[Iterable[Any]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([inert(cell) for cell in row] for row in rows)
    write_atomic(Path(target), text.getvalue().encode(errors="replace"))


def written_out(results: Results) -> Results:
    """The results for JSON, with every row of the confusion matrix."""
    return {place: {**result, "confusion": list(result["confusion"])} for place, result in results.items()}


def write_results(target: str, results: Results) -> None:
    """All metrics as .json, or one row for each data set as .csv."""
    if target.endswith(".json"):
        text = json.dumps({"results": written_out(results)}, indent=1)
        write_atomic(Path(target), text.encode() + b"\n")
        return
    names = list(dict.fromkeys(name for row in results.values() for name, v in row.items() if _plain(v)))
    rows = ([place, *(row.get(name) for name in names)] for place, row in results.items())
    _write_csv(target, [["data", *names], *rows])


def _plain(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple | Confusion)


def write_per_class(target: str, results: Results) -> None:
    """One row for each class of each data set."""
    rows: list[list[Any]] = [["data", "class", "images", "top1"]]
    for place, result in results.items():
        for index, (name, accuracy) in enumerate(result["per_class"].items()):
            rows.append([place, name, result["confusion"].images(index), accuracy])
    _write_csv(target, rows)


def write_confusion(target: str, results: Results) -> None:
    """Confusion matrix of the first data set: a row for each true class, a column for each predicted one."""
    first = next(iter(results.values()))
    named = zip(first["per_class"], first["confusion"], strict=True)
    _write_csv(target, [["true class", *first["per_class"]], *([name, *row] for name, row in named)])
