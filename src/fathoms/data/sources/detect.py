"""Open a data set by its path: the reader is detected from the files there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fathoms.data.errors import DataError
from fathoms.data.sources.arrays import ArraySource
from fathoms.data.sources.base import Source
from fathoms.data.sources.cifar import cifar_splits, is_cifar, open_cifar
from fathoms.data.sources.folder import FolderSource, folder_splits
from fathoms.data.sources.hub import PREFIX, hub_splits, open_hub
from fathoms.data.sources.idx import idx_splits, open_idx
from fathoms.data.sources.npz import npz_splits, open_npz
from fathoms.data.sources.pack import INDEX_NAME, open_pack, pack_splits
from fathoms.data.sources.shards import open_shards, open_tar_folder, shard_splits, tar_splits
from fathoms.data.sources.tar_index import read_index
from fathoms.names.registry import Registry

AnySource = Source | ArraySource
READERS: Registry[AnySource, None] = Registry("data source")

READERS.add("folder")(FolderSource)
READERS.add("pack")(open_pack)
READERS.add("tar-folder")(open_tar_folder)
READERS.add("npz")(open_npz)
READERS.add("idx")(open_idx)
READERS.add("cifar")(open_cifar)
READERS.add("hub")(open_hub)
READERS.add("webdataset")(open_shards)

# The splits that are there, by name: nothing is opened, so that one that cannot be opened is not missed.
SPLITS: dict[str, Callable[[Any], list[str]]] = {
    "folder": folder_splits,
    "pack": pack_splits,
    "tar-folder": tar_splits,
    "npz": npz_splits,
    "idx": idx_splits,
    "cifar": cifar_splits,
    "hub": hub_splits,
    "webdataset": shard_splits,
}


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
    reader = READERS[kind or detect(path)]
    return reader(str(path), split)


def list_splits(path: str | Path, kind: str | None = None) -> list[str]:
    """List the splits of a data set, training first; whether they can be opened is another question."""
    kind = READERS.check(kind or detect(path), "kind")
    found = SPLITS[kind](str(path) if kind == "hub" else Path(path))
    # Opening what is not there gives the reason.
    return found or [open_source(path, "train", kind).split]
