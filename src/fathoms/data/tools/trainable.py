"""Checks before training: the data set is as it was checked, and its splits share their classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fathoms.data.sources.detect import AnySource
from fathoms.data.sources.folder import folder_splits
from fathoms.data.sources.splits import Roles
from fathoms.data.tools.manifest import verify_sources
from fathoms.errors import ConfigError


def check_trainable(path: str | None, roles: Roles) -> None:
    """Refuse data that changed since its check, has one class, or has a class that a split lacks; None: the digits."""
    train = roles.train
    if path is not None:
        whole = {id(source): source for source in (getattr(split, "source", split) for split in roles[:3])}
        verify_sources(path, tuple(source for source in whole.values() if source is not None))
    _check_classes(path, train)
    for split in (roles.val, roles.test):
        odd = [] if split is None else sorted(set(train.classes) ^ set(split.classes))
        if odd:
            raise ConfigError(
                f"{path}: class {odd[0]!r} has no images in one of the splits; fill or remove it"
            )
    empty = np.setdiff1d(np.arange(len(train.classes)), train.labels)
    if len(empty):
        remedy = "fill or remove it"
        if list(train.classes) == [str(number) for number in range(len(train.classes))]:
            remedy += ", or number the classes from 0, as numpy.unique(y, return_inverse=True)[1] does"
        raise ConfigError(f"{path}: class {train.classes[empty[0]]!r} has no training images; {remedy}")


def _check_classes(path: str | None, train: AnySource) -> None:
    """Refuse a single class: any model has it right, and learns nothing."""
    if len(train.classes) > 1:
        return
    only = train.classes[0]
    inside = Path(path or "", only)
    if inside.is_dir() and folder_splits(inside) != ["all"]:
        remedy = f"did you mean {inside}?"
    else:
        remedy = "give each class a folder, or a number, of its own"
    raise ConfigError(f"{path}: has one class, {only!r}, and a classifier needs two; {remedy}")
