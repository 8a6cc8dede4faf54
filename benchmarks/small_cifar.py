"""A small training set out of a large one: `python benchmarks/small_cifar.py cifar10.npz cifar10_5000.npz`.

The first 500 images of each class train, the next 500 are val, on which choices are made, and the test set stays whole,
so that scores are as exact as those of the large one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

PER_CLASS = 500


def first_of_each_class(labels: np.ndarray, start: int, count: int) -> np.ndarray:
    """Indices, in their order, of `count` images of each class after its first `start`."""
    found = []
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)[start : start + count]
        if len(own) < count:
            raise ValueError(f"class {label} has {start + len(own)} images; {start + count} are needed")
        found.append(own)
    return np.sort(np.concatenate(found))


def smaller(arrays: dict[str, np.ndarray], per_class: int) -> dict[str, np.ndarray]:
    """The arrays with `per_class` images of each class to train on and as many others as val."""
    made = {name: arrays[name] for name in ("x_test", "y_test", "classes")}
    for split, start in (("train", 0), ("val", per_class)):
        chosen = first_of_each_class(arrays["y_train"], start, per_class)
        made |= {f"{part}_{split}": arrays[f"{part}_train"][chosen] for part in "xy"}
    return made


def main() -> None:
    """Write the smaller file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="an .npz with x_train, y_train, x_test, y_test and classes")
    parser.add_argument("target", type=Path)
    parser.add_argument("--per-class", type=int, default=PER_CLASS, help="images of each class; default: 500")
    arguments = parser.parse_args()
    with np.load(arguments.source) as file:
        arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test", "classes")}
    np.savez_compressed(arguments.target, **smaller(arrays, arguments.per_class))


if __name__ == "__main__":
    main()
