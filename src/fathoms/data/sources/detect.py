"""Open a data set by its path: the reader is detected from the files there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fathoms.data.errors import DataError
from fathoms.data.sources.arrays import ArraySource, npz_splits, open_cifar, open_idx, open_npz
from fathoms.data.sources.base import SPLIT_NAMES, Source
from fathoms.data.sources.folder import FolderSource, folder_splits
from fathoms.data.sources.hub import PREFIX, open_hub
from fathoms.data.sources.shards import INDEX_NAME, open_pack, open_tar_folder, open_webdataset
from fathoms.data.sources.tar_index import read_index
from fathoms.registry import Registry
from fathoms.untrusted_files import read_json

AnySource = Source | ArraySource
READERS: Registry[AnySource, None] = Registry("data source")

READERS.add("folder")(FolderSource)
READERS.add("pack")(open_pack)
READERS.add("tar-folder")(open_tar_folder)
READERS.add("npz")(open_npz)
READERS.add("idx")(open_idx)
READERS.add("cifar")(open_cifar)
READERS.add("hub")(open_hub)


@READERS.add("webdataset")
def open_shards(path: str | Path, split: str = "train") -> Source:
    """WebDataset shards: one tar file, or a folder with SPLIT-*.tar in it."""
    path = Path(path)
    if path.is_file():
        return open_webdataset([path], split)
    for name in SPLIT_NAMES.get(split, (split,)):
        found = sorted(
            {*path.glob(f"{name}-*.tar"), *path.glob(f"{name}/*.tar"), *path.glob(f"*-{name}-*.tar")}
        )
        if found:
            return open_webdataset(found, name)
    raise DataError(f"{path}: no shards of split {split!r}; they are called {split}-000000.tar and so on")


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
    if not place.is_dir():
        raise DataError(f"{place}: no such file or folder; check the path")
    tests: list[tuple[str, Callable[[], bool]]] = [
        ("pack", lambda: (place / INDEX_NAME).is_file()),
        ("hub", lambda: any((place / n).is_file() for n in ("dataset_dict.json", "dataset_info.json"))),
        ("idx", lambda: any(place.glob("train-images*idx3-ubyte*"))),
        (
            "cifar",
            lambda: (place / "data_batch_1.bin").is_file() or (place / "fine_label_names.txt").is_file(),
        ),
        ("webdataset", lambda: any(place.glob("*.tar")) or any(place.glob("*/*.tar"))),
    ]
    return next((name for name, test in tests if test()), "folder")


def open_source(path: str | Path, split: str = "train", kind: str | None = None) -> AnySource:
    """Open one split of the data set at `path`; `kind` names the reader if detection is wrong."""
    reader = READERS[kind or detect(path)]
    return reader(str(path), split)


def list_splits(path: str | Path, kind: str | None = None) -> list[str]:
    """List the splits of a data set, training first."""
    kind = READERS.check(kind or detect(path), "kind")
    if kind == "folder":
        return sorted(folder_splits(Path(path)), key=_training_first)
    if kind == "pack":
        splits = read_json(Path(path) / INDEX_NAME, DataError).get("splits")
        if not isinstance(splits, dict):
            raise DataError(f"{Path(path) / INDEX_NAME}: names no splits; pack again")
        return sorted(splits, key=_training_first)
    found = npz_splits(path) if kind == "npz" else _openable_splits(path, kind)
    if not found:
        open_source(path, "train", kind)
    return found


def _openable_splits(path: str | Path, kind: str) -> list[str]:
    """The splits that can be opened, each under its own name."""
    found: list[str] = []
    for split in ("train", "val", "test", "all"):
        try:
            source = open_source(path, split, kind)
        except DataError:
            continue
        if source.split not in found:
            found.append(source.split)
        # A single tar of samples has no splits; every name opens the same samples.
        if kind == "webdataset" and Path(path).is_file():
            break
    return found


def _training_first(name: str) -> tuple[bool, str]:
    return name not in SPLIT_NAMES["train"], name
