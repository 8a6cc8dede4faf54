"""Roles of a data set's splits: train, val for every choice, test once at the end.

| the data has | val | test |
|---|---|---|
| train, val, test | val | test |
| train, val | val | none |
| train, test | 5 % of train, stratified | test |
| one set without splits | 10 % of it, stratified | none |

With a `val_share` val is always that share of the training set (0: there is no val), and the held-out split, whatever
its name, is the test set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fathoms.data.errors import DataError
from fathoms.data.sources.base import SPLIT_NAMES
from fathoms.data.sources.detect import AnySource, list_splits, open_source
from fathoms.data.sources.fingerprint import earlier_fingerprint
from fathoms.data.sources.subset import ArraySubset, SourceSubset, stratified, subset
from fathoms.errors import ConfigError
from fathoms.files.untrusted import read_json
from fathoms.names.registry import check_name
from fathoms.text_table import plural

SPLIT_SEED = 0
"""Seed of the val split; apart from the run's, so that all seeds of a comparison share it."""
BESIDE_TEST = 0.05
ALONE = 0.1
DIGITS = "digits"
"""Name of the built-in data set."""
_DIGITS = 64
"""Of the fingerprint of one split, a sha256."""
_TRAIN, _VAL, _WHOLE = SPLIT_NAMES["train"], SPLIT_NAMES["val"], SPLIT_NAMES["all"]


def _digits() -> tuple[AnySource, AnySource]:
    # Imports torch, which listing splits does without.
    from fathoms.data.sources.digits import digit_sources

    return digit_sources()


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
        """Hashes of all splits, in their order."""
        return "".join(split.fingerprint() for split in self[:3] if split is not None)

    def has_fingerprint(self, stored: object) -> bool:
        """Whether a stored fingerprint is of these data, by today's kind or by that of earlier versions."""
        if stored == self.fingerprint():
            return True
        return stored == "".join(earlier_fingerprint(split) for split in self[:3] if split is not None)

    def changes(self, stored: object) -> str:
        """The splits in which a stored fingerprint differs, as "test 0123456789ab -> ba9876543210"."""
        text, now = str(stored), self._named()
        before = [text[start : start + _DIGITS] for start in range(0, len(text), _DIGITS)]
        if len(before) != len(now):
            return f"{plural(len(before), 'split')} -> {len(now)}"
        return ", ".join(
            f"{name} {old[:12]} -> {split.fingerprint()[:12]}"
            for old, (name, split) in zip(before, now.items(), strict=True)
            if old not in (split.fingerprint(), earlier_fingerprint(split))
        )

    def _named(self) -> dict[str, AnySource]:
        """The splits that exist, by role."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    def sizes(self) -> dict[str, int | float]:
        """Images of each role, and the share of the training set that became val."""
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
        whole, test = _digits()
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


def open_splits(path: str | None) -> tuple[AnySource, AnySource]:
    """The training and the held-out split, as runs before the three roles used them; kept for resuming those."""
    if path in (None, DIGITS):
        return _digits()
    splits = list_splits(path)
    held_out = next((split for split in splits if split not in _TRAIN + _WHOLE), None)
    if held_out is None:
        raise ConfigError(
            f"{path}: has no held-out split (val, validation or test); it has {', '.join(splits)}; this run began "
            "with one: restore it, or choose another --experiment"
        )
    return open_source(path, "train"), open_source(path, held_out)


def open_held_out(path: str, split: str | None = None, run: Path | None = None) -> AnySource:
    """The split to measure: `split`, else test, else val, else data without splits; "digits" are built in.

    Where nothing was held out and a run carved its val split from the data, it is that split.
    """
    if path == DIGITS:
        train, test = _digits()
        return (
            train if check_name(split or "test", ("train", "test"), "split", "--split") == "train" else test
        )
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
