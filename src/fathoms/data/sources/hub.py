"""Hugging Face data sets as a source: encoded bytes straight from Arrow, not decoded by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fathoms.data.errors import BadImageError, DataError
from fathoms.data.sources.base import MAX_FILE, SPLIT_NAMES, digest_lines, pick_split
from fathoms.data.sources.left_out import LeftOut
from fathoms.errors import reason
from fathoms.files.untrusted import MAX_CLASSES, check_names, read_plain
from fathoms.machine.hub_reach import hub_or_cache

PREFIX = "hfds/"


class HubSource:
    """One split of a `datasets.Dataset` with an image column and a label column."""

    kind = "hub"

    def __init__(self, dataset: Any, split: str, image_key: str = "image", label_key: str = "label") -> None:
        import datasets

        for key in (image_key, label_key):
            if key not in dataset.column_names:
                raise DataError(f"hub: no column {key!r}; it has {', '.join(dataset.column_names)}")
        self.split, self.left_out = split, LeftOut()
        labels = np.asarray(dataset.with_format("numpy")[label_key][:])
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or not labels.size:
            raise DataError(f"hub: column {label_key!r} does not hold labels; whole numbers are expected")
        self.labels = labels.astype(np.int64)
        named, top = getattr(dataset.features[label_key], "names", None), int(self.labels.max())
        if self.labels.min() < 0 or top >= (len(named) if named else MAX_CLASSES):
            raise DataError(f"hub: labels of column {label_key!r} run to {top}; number the classes from 0")
        self.classes = check_names(list(named or map(str, range(top + 1))), "hub", DataError)
        # decode=False gives the stored bytes, so that the crop can be chosen before decoding.
        self._dataset = dataset.cast_column(image_key, datasets.Image(decode=False))
        self._key = image_key

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> bytes:
        """The stored bytes of one image."""
        value = self._dataset[int(index)][self._key]
        if value.get("bytes"):
            return value["bytes"]
        if not value.get("path"):
            raise BadImageError("the row holds no image")
        return read_plain(value["path"], MAX_FILE)

    def where(self, index: int) -> str:
        """SPLIT[ROW]."""
        return f"{self.split}[{index}]"

    def size(self, index: int) -> int:
        """The size of the stored bytes."""
        return len(self.read(index))

    def fingerprint(self) -> str:
        """Hash of the table as kept by `datasets`, with the labels."""
        return digest_lines([str(self._dataset._fingerprint), *self.classes, self.labels.tobytes().hex()])


def _from_hub(datasets: Any, name: str) -> Any:
    """A data set of the Hub; from the cache only, and at once, where the Hub is out of reach."""
    with hub_or_cache() as online:
        try:
            return datasets.load_dataset(name)
        except Exception as error:
            if online:
                raise
            raise DataError(
                f"{PREFIX}{name}: the Hub cannot be reached, and the local cache does not hold it; "
                "check the network, or give a folder"
            ) from error


def hub_splits(path: str) -> list[str]:
    """The splits of a data set, training first; those under other names are counted by the reader."""
    return _known(_load(path))


def _known(loaded: Any) -> list[str]:
    return [name for names in SPLIT_NAMES.values() for name in names if name in loaded]


def _load(path: str) -> Any:
    """The splits by name; a data set without splits is "all"."""
    try:
        import datasets
    except ImportError as error:
        raise DataError("hub: the package 'datasets' is missing; pip install 'fathoms[data]'") from error
    try:
        if path.startswith(PREFIX):
            # Data sets that need their own Python code are not loaded: no untrusted code is run.
            loaded = _from_hub(datasets, path.removeprefix(PREFIX))
        else:
            loaded = datasets.load_from_disk(path)
    except DataError:
        raise
    # Arrow, its JSON and the network raise errors of a dozen packages.
    except Exception as error:
        raise DataError(
            f"{path}: not a readable data set ({reason(error)}); save or fetch it again"
        ) from error
    return {"all": loaded} if isinstance(loaded, datasets.Dataset) else loaded


def open_hub(path: str, split: str = "train") -> HubSource:
    """A data set saved with `save_to_disk`, or `hfds/NAME` from the hub's cache or the network."""
    loaded = _load(path)
    import datasets

    found = pick_split(split, [str(name) for name in loaded], path)
    dataset = loaded[found]
    image_key = next((k for k, f in dataset.features.items() if isinstance(f, datasets.Image)), "image")
    label_key = next((k for k, f in dataset.features.items() if isinstance(f, datasets.ClassLabel)), "label")
    source = HubSource(dataset, found, image_key, label_key)
    known = _known(loaded)
    if [found] == known[:1]:
        for name in sorted(set(map(str, loaded)) - set(known)):
            source.left_out.add("split of another name", name)
    return source
