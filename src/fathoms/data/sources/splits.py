"""Open a data set by its path; the roles of its splits: train, val for every choice, test once at the end.

docs/data.md has the table of roles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fathoms.data.sources.arrays import ArraySource, as_source, digit_sources, npz_splits, open_npz
from fathoms.data.sources.image_folder import FolderSource, folder_splits
from fathoms.data.sources.known_formats import (
    PREFIX,
    cifar_splits,
    hub_splits,
    idx_splits,
    is_cifar,
    open_cifar,
    open_hub,
    open_idx,
)
from fathoms.data.sources.pack_index import INDEX_NAME, open_pack, pack_splits
from fathoms.data.sources.source import SPLIT_NAMES, DataError, Source
from fathoms.data.sources.tar_files import open_shards, open_tar_folder, read_index, shard_splits, tar_splits
from fathoms.errors import ConfigError
from fathoms.registry import Registry, check_name
from fathoms.text_table import plural
from fathoms.untrusted import read_json


class SourceSubset:
    """Samples of a file-backed source, in the order of `indices`, in the role `split`."""

    def __init__(self, source: Source, indices: np.ndarray, split: str) -> None:
        self.source, self.indices, self.split = source, indices, split
        self.kind, self.classes, self.labels = source.kind, source.classes, source.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> bytes:
        return self.source.read(int(self.indices[index]))

    def where(self, index: int) -> str:
        return self.source.where(int(self.indices[index]))

    def size(self, index: int) -> int:
        return self.source.size(int(self.indices[index]))

    def fingerprint(self) -> str:
        return _fingerprint(self.source.fingerprint(), self.indices)


class ArraySubset(ArraySource):
    """Samples of arrays, in the order of `indices`; see `SourceSubset`."""

    def __init__(self, source: ArraySource, indices: np.ndarray, split: str) -> None:
        super().__init__(source.kind, split, source.images[indices], source.labels[indices], source.classes)
        self.source, self.indices = source, indices

    def where(self, index: int) -> str:
        return self.source.where(int(self.indices[index]))

    def fingerprint(self) -> str:
        return _fingerprint(self.source.fingerprint(), self.indices)


def _fingerprint(whole: str, indices: np.ndarray) -> str:
    return hashlib.sha256(whole.encode() + indices.astype("<i8").tobytes()).hexdigest()


def subset(source: Source | ArraySource, indices: np.ndarray, split: str) -> SourceSubset | ArraySubset:
    if isinstance(source, ArraySource):
        return ArraySubset(source, indices, split)
    return SourceSubset(source, indices, split)


def stratified(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of what stays and of a share that is taken out, the same share of every class; both ascending.

    A class keeps at least one sample, and gives one as soon as it has two.
    """
    rng = np.random.default_rng(seed)
    taken: list[np.ndarray] = []
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(share * len(own))), len(own) - 1)
        taken.append(own[:count])
    out = np.sort(np.concatenate(taken))
    return np.setdiff1d(np.arange(len(labels)), out), out


AnySource = Source | ArraySource
# Each with a function that lists the splits which are there: none is opened, so that one which cannot be is not missed.
READERS: Registry[AnySource, Callable[[Any], list[str]]] = Registry("data source", folder_splits)

READERS.add("folder", folder_splits)(FolderSource)
READERS.add("pack", pack_splits)(open_pack)
READERS.add("tar-folder", tar_splits)(open_tar_folder)
READERS.add("npz", npz_splits)(open_npz)
READERS.add("idx", idx_splits)(open_idx)
READERS.add("cifar", cifar_splits)(open_cifar)
READERS.add("hub", hub_splits)(open_hub)
READERS.add("webdataset", shard_splits)(open_shards)


def detect(path: str | Path) -> str:
    """Detect the reader of the data set at `path`."""
    if str(path).startswith(PREFIX):
        return "hub"
    place = Path(path)
    if place.is_file():
        if place.suffix == ".npz":
            return "npz"
        if place.suffix == ".tar":
            return "webdataset" if any(m.name.endswith(".cls") for m in read_index(place)) else "tar-folder"
        raise DataError(f"{place}: neither .tar nor .npz; give a folder, a tar or an .npz file")
    if place.exists() and not place.is_dir():
        raise DataError(f"{place}: is a device or a pipe; give a folder, a tar or an .npz file")
    if not place.is_dir():
        raise DataError(f"{place}: no such file or folder; check the path")
    tests: list[tuple[str, Callable[[], bool]]] = [
        ("pack", lambda: (place / INDEX_NAME).is_file()),
        ("hub", lambda: any((place / n).is_file() for n in ("dataset_dict.json", "dataset_info.json"))),
        ("idx", lambda: bool(idx_splits(place))),
        ("cifar", lambda: is_cifar(place)),
        ("webdataset", lambda: any(place.glob("*.tar")) or any(place.glob("*/*.tar"))),
    ]
    return next((name for name, test in tests if test()), "folder")


def open_source(path: str | Path, split: str = "train", kind: str | None = None) -> AnySource:
    """Open one split of the data set at `path`; `kind` names the reader if detection is wrong."""
    return READERS[kind or detect(path)](str(path), split)


def list_splits(path: str | Path, kind: str | None = None) -> list[str]:
    """List the splits of a data set, training first; whether they can be opened is another question."""
    kind = READERS.check(kind or detect(path), "kind")
    found = READERS.metadata(kind)(str(path) if kind == "hub" else Path(path))
    # Opening what is not there gives the reason.
    return found or [open_source(path, "train", kind).split]


SPLIT_SEED = 0
"""Seed of the val split; apart from the run's, so that all seeds of a comparison share it."""
BESIDE_TEST = 0.05
ALONE = 0.1
DIGITS = "digits"
"""Name of the built-in data set."""
_DIGITS = 64
"""Of the fingerprint of one split, a sha256."""
_TRAIN, _VAL, _WHOLE = SPLIT_NAMES["train"], SPLIT_NAMES["val"], SPLIT_NAMES["all"]


class Roles(NamedTuple):
    """The splits of a data set by what they are used for.

    Args:
        train: What is trained on.
        val: What every choice is made on: best checkpoint, tuning; None without one.
        test: What is evaluated once, at the end; None where the data has none.
        carved: Share of the training set that val was taken from; 0 if the data came with a val split.
        unused: Names of further splits, which play no role.
    """

    train: AnySource
    val: AnySource | None
    test: AnySource | None
    carved: float = 0.0
    unused: tuple[str, ...] = ()

    def whole(self) -> list[AnySource]:
        """The splits as the data has them: without what was carved from train."""
        own = [self.train, None if self.carved else self.val, self.test]
        return [getattr(split, "source", split) for split in own if split is not None]

    def held_out(self) -> AnySource | None:
        """The set that results are reported on: test, or val where there is no test."""
        return self.test if self.test is not None else self.val

    def fingerprint(self) -> str:
        return "".join(split.fingerprint() for split in self[:3] if split is not None)

    def changes(self, stored: object) -> str:
        """The splits in which a stored fingerprint differs, as "test 0123456789ab -> ba9876543210"."""
        text, now = str(stored), self._named()
        before = [text[start : start + _DIGITS] for start in range(0, len(text), _DIGITS)]
        if len(before) != len(now):
            return f"{plural(len(before), 'split')} -> {len(now)}"
        return ", ".join(
            f"{name} {old[:12]} -> {split.fingerprint()[:12]}"
            for old, (name, split) in zip(before, now.items(), strict=True)
            if old != split.fingerprint()
        )

    def _named(self) -> dict[str, AnySource]:
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    def sizes(self) -> dict[str, int | float]:
        return {**{name: len(split) for name, split in self._named().items()}, "val_share": self.carved}

    def split(self) -> dict[str, Any] | None:
        """The val split that was carved: seed, share and indices into the training set; None without one."""
        if not self.carved or not isinstance(self.val, SourceSubset | ArraySubset):
            return None
        indices = self.val.indices.tolist()
        return {"version": 1, "seed": SPLIT_SEED, "share": self.carved, "val_indices": indices}

    def describe(self) -> str:
        """Sizes and origin of the roles, in a line."""
        parts = [f"{len(self.train)} to train"]
        if self.val is not None:
            origin = f" ({self.carved:g} of the training set, stratified)" if self.carved else ""
            parts.append(f"{len(self.val)} val{origin}")
        parts.append(f"{len(self.test)} test" if self.test is not None else "no test set")
        return ", ".join(parts)


def open_roles(path: str | None, val_share: float | None = None) -> Roles:
    """Open a data set by its roles; None and "digits" are the built-in digits, a path of that name is "./digits"."""
    if path in (None, DIGITS):
        whole, test = digit_sources()
        return _carve(whole, None, test, val_share)
    splits = list_splits(path)
    held_out = [name for name in splits if name not in _TRAIN + _WHOLE]
    val_name = next((name for name in held_out if name in _VAL), None)
    test_name = next((name for name in held_out if name not in _VAL), None)
    # Without a training split only a set without splits will do: opening "train" then gives the reason.
    named = next((name for name in splits if name in _TRAIN), None)
    train = open_source(path, named or next((name for name in splits if name in _WHOLE), "train"))
    val = None if val_name is None else open_source(path, val_name)
    test = None if test_name is None else open_source(path, test_name)
    unused = tuple(name for name in held_out if name not in (val_name, test_name))
    return _carve(train, val, test, val_share)._replace(unused=unused)


def roles_in_memory(data: Any, val_share: float | None = None) -> Roles:
    """The roles of arrays: a pair of images and labels, a data set of such, or a dict of either by split."""
    splits = data if isinstance(data, Mapping) else {"train": data}
    for name in splits:
        check_name(name, ("train", "val", "test"), "split", "data")
    if "train" not in splits:
        raise DataError("data: no split is called 'train'; give one to train on")
    train = as_source(splits["train"], "train")
    val, test = (
        as_source(splits[name], name, train.classes) if name in splits else None for name in ("val", "test")
    )
    return _carve(train, val, test, val_share)


def share_for_comparison(path: str | None) -> float | None:
    """The share of val in a comparison, which reports on the held-out split and so must not choose on it.

    None where the data has both val and test.
    """
    names = ["train", "test"] if path in (None, DIGITS) else list_splits(path)
    held_out = [name for name in names if name not in _TRAIN + _WHOLE]
    if not held_out:
        return ALONE
    has_val, has_test = any(n in _VAL for n in held_out), any(n not in _VAL for n in held_out)
    return None if has_val and has_test else BESIDE_TEST


def _carve(train: AnySource, val: AnySource | None, test: AnySource | None, share: float | None) -> Roles:
    if share is not None and val is not None and test is not None:
        raise ConfigError("--val-share would not be used: the data has a val and a test split; leave it out")
    if share is None:
        if val is not None:
            return Roles(train, val, test)
        share = BESIDE_TEST if test is not None else ALONE
    test = test if test is not None else val
    if share == 0.0:
        return Roles(train, None, test)
    kept, out = stratified(train.labels, share, SPLIT_SEED)
    if not len(out):
        raise ConfigError("every class has a single image, so none can be held out; give --val-share 0")
    return Roles(subset(train, kept, "train"), subset(train, out, "val"), test, share)


def check_split(path: Path, split: dict[str, Any] | None) -> None:
    """Refuse a split.json that is not the split that follows from the data; a missing one is written again."""
    if split is None or not path.is_file():
        return
    try:
        same = read_json(path, DataError) == split
    except DataError:
        same = False
    if not same:
        raise ConfigError(
            f"{path}: damaged or edited, it is not the val split of this data; remove it, and the same command writes "
            "it again"
        )


def open_held_out(path: str, split: str | None = None, run: Path | None = None) -> AnySource:
    """The split to measure: `split`, else test, else val, else data without splits; "digits" are built in.

    Where nothing was held out and a run carved its val split from the data, it is that split.
    """
    if path == DIGITS:
        train, test = digit_sources()
        found = check_name(split or "test", ("train", "test"), "split", "--split")
        return train if found == "train" else test
    if split is not None:
        return _named_split(path, split)
    names = [name for name in list_splits(path) if name not in _TRAIN]
    if not set(names) - set(_WHOLE) and run is not None and (run / "split.json").is_file():
        return _carved_by(run, open_source(path, names[0] if names else "train"))
    best = next((name for name in names if name not in _VAL + _WHOLE), names[0] if names else "all")
    return open_source(path, best)


def _named_split(path: str, split: str) -> AnySource:
    """A split by the name given as --split; the nearest one is offered if the data has none of that name."""
    try:
        return open_source(path, split)
    except DataError:
        names = list_splits(path)
        # One that is there, maybe under another of its names, has its own reason.
        if not set(SPLIT_NAMES.get(split, (split,))) & set(names):
            check_name(split, names, "split", "--split")
        raise


def _carved_by(run: Path, whole: AnySource) -> AnySource:
    """The val split that a run carved from a set without splits."""
    indices = read_json(run / "split.json", DataError).get("val_indices")
    last = len(whole) - 1
    if not isinstance(indices, list) or not all(type(i) is int and 0 <= i <= last for i in indices):
        raise DataError(f"{run / 'split.json'}: does not belong to this data; give --split")
    return subset(whole, np.array(indices, np.int64), "val")
