"""Classes of other data sets matched by name or number, ReaL labels, and the table of classes."""

from __future__ import annotations

import json

import pytest

from fathoms import FathomsError
from fathoms.evaluating.metrics import Confusion
from fathoms.evaluating.results import (
    ALL,
    HARDEST,
    class_note,
    class_table,
    image_number,
    match_classes,
    read_real,
    real_of,
)


def test_classes_are_matched_by_name_by_number_or_refused():
    wordnet = ["n01", "n02", "n10"]
    assert match_classes(["n10", "n01"], wordnet, "imagenet-r") == [2, 0]
    assert match_classes(["0", "1", "2"], wordnet, "imagenetv2") == [0, 1, 2]
    assert match_classes(["10", "2"], [f"n{i}" for i in range(11)], "imagenetv2") == [10, 2]
    with pytest.raises(FathomsError, match="imagenet-a: the model has no class 'n03'; the nearest is 'n"):
        match_classes(["n03"], wordnet, "imagenet-a")
    with pytest.raises(FathomsError, match="has no class '7'"):
        match_classes(["7"], wordnet, "imagenetv2")


def test_real_labels_are_read_by_image_number(tmp_path):
    path = tmp_path / "real.json"
    path.write_text(json.dumps([[3], [], [1, 2]]))
    assert read_real(path) == {1: (3,), 3: (1, 2)}
    assert image_number("val/n01/ILSVRC2012_val_00000003.JPEG") == 3
    for bad in ("{}", "[1]", '[["a"]]', "["):
        path.write_text(bad)
        with pytest.raises(FathomsError, match="ReaL"):
            read_real(path)
    with pytest.raises(FathomsError, match="ReaL labels need a number at the end"):
        image_number("cat.jpg")


def test_data_of_other_classes_that_can_be_matched_gets_a_line():
    model = ["ant", "bee", "cat", "dog"]
    assert class_note(["dog", "cat", "bee", "ant"], model, "set") is None
    assert (
        class_note(["ant"], model, "set")
        == "set: has 1 of the model's 4 classes; the others are not considered"
    )
    assert class_note(["0", "1"], model, "set") == (
        "set: its classes are numbers, and are taken for the model's by their order ('ant', 'bee', 'cat', …)"
    )


def test_real_labels_are_numbers_of_the_datas_classes():
    images = ["val_00000001.JPEG", "val_00000002.JPEG"]

    class Source(list):
        classes = ("ant", "bee")
        where = list.__getitem__

    assert real_of(Source(images), {2: (1,), 9: (0,)}, "real.json") == {1: (1,)}
    with pytest.raises(FathomsError, match="real.json: has labels for none of the images"):
        real_of(Source(images), {9: (0,)}, "real.json")
    with pytest.raises(FathomsError, match="real.json: has class 2, the data 2 classes"):
        real_of(Source(images), {1: (2,)}, "real.json")


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
    fewer = {str(i): float(i) for i in range(ALL)}
    assert len(class_table(fewer, rows).splitlines()) == 1 + ALL
    assert lines[-1] == f"and {count - HARDEST} easier classes; --per-class FILE.csv has all"
