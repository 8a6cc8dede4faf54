"""Classes and confusions as `fathoms validate` prints them."""

from __future__ import annotations

from fathoms.evaluate.class_table import ALL, HARDEST, class_table
from fathoms.evaluate.confusion import Confusion


def test_classes_come_hardest_first_with_what_they_are_taken_for():
    confusion = Confusion(4, {0: {0: 8, 1: 2}, 1: {1: 9, 2: 1}, 2: {0: 3, 1: 2, 2: 5}})
    table = class_table({"cat\n": 80.0, "dog": 90.0, "a cow": 50.0, "none": None}, confusion)
    assert table.splitlines() == [
        "class  images  top1  most often taken for",
        "a cow  10      50.0  cat\\n (3), dog (2)",
        "cat\\n  10      80.0  dog (2)",
        "dog    10      90.0  a cow (1)",
    ]


def test_of_many_classes_the_hardest_are_listed():
    count = ALL + 5
    rows = Confusion(count, {i: {i: 1} for i in range(count)})
    lines = class_table({str(i): float(i) for i in range(count)}, rows).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [str(i) for i in range(HARDEST)]
    assert lines[-1] == f"and {count - HARDEST} easier classes; --per-class FILE.csv has all"
