"""Small data sets of every kind, made from the same images."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fathoms.data.packing import PackOptions, pack_split, write_index
from fathoms.data.sampler import Batch
from fathoms.data.sources.splits import READERS

SIDE = 32
LABELS = {"train": [0, 1, 2, 0, 1, 2], "val": [2, 0, 1]}


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG, with its length and its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def same_batches(first: Iterable[Batch], second: Iterable[Batch]) -> bool:
    """Whether two epochs have the same images, labels, numbers and soft targets, bit for bit."""
    return all(
        torch.equal(getattr(a, part), getattr(b, part))
        for a, b in zip(first, second, strict=True)
        for part in ("images", "labels", "ids", "targets")
    )


def pixels_of(split: str) -> np.ndarray:
    """Smooth random images, the same for every kind of source."""
    rng = np.random.default_rng(len(split))
    coarse = rng.integers(0, 256, (len(LABELS[split]), 4, 4, 3), dtype=np.uint8)
    return coarse.repeat(SIDE // 4, axis=1).repeat(SIDE // 4, axis=2)


def files_of(split: str) -> list[bytes]:
    """The images of a split as PNG files."""

    def encoded(pixels):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    return [encoded(pixels) for pixels in pixels_of(split)]


def write_tar(path: Path, entries: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def tree(split: str) -> list[tuple[str, bytes]]:
    pairs = zip(LABELS[split], files_of(split), strict=True)
    return [(f"{split}/{'abc'[label]}/{i}.png", data) for i, (label, data) in enumerate(pairs)]


def make_folder(root: Path) -> Path:
    for name, data in [*tree("train"), *tree("val")]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def make_tar_folder(root: Path) -> Path:
    write_tar(root / "images.tar", [*tree("train"), *tree("val")])
    return root / "images.tar"


def make_webdataset(root: Path) -> Path:
    for split, labels in LABELS.items():
        entries = []
        for i, (label, data) in enumerate(zip(labels, files_of(split), strict=True)):
            entries += [(f"{i}.png", data), (f"{i}.cls", str(label).encode())]
        write_tar(root / f"{split}-000000.tar", entries)
    (root / "classes.txt").write_text("a\nb\nc\n")
    return root


def make_pack(root: Path) -> Path:
    images, packed = make_folder(root / "images"), root / "packed"
    options = PackOptions(shard_samples=4)
    splits = {
        name: pack_split(READERS["folder"](images, name), packed, options)[0] for name in ("train", "val")
    }
    write_index(packed, ("a", "b", "c"), splits, options)
    return packed


def make_npz(root: Path) -> Path:
    arrays = {f"x_{split}": pixels_of(split) for split in LABELS}
    arrays |= {f"y_{split}": np.array(labels) for split, labels in LABELS.items()}
    np.savez(root / "images.npz", classes=np.array(["a", "b", "c"]), **arrays)
    return root / "images.npz"


def make_idx(root: Path) -> Path:
    for split, prefix in (("train", "train"), ("val", "t10k")):
        grey, labels = pixels_of(split)[..., 0], LABELS[split]
        images = struct.pack(">IIII", 0x803, *grey.shape) + grey.tobytes()
        (root / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, len(labels)) + bytes(labels)
        )
    return root


def make_cifar(root: Path) -> Path:
    def records(split):
        planes = pixels_of(split).transpose(0, 3, 1, 2).reshape(len(LABELS[split]), -1)
        return [bytes([label]) + row.tobytes() for label, row in zip(LABELS[split], planes, strict=True)]

    train = records("train")
    for number in range(1, 6):
        (root / f"data_batch_{number}.bin").write_bytes(
            b"".join(train[number - 1 : number if number < 5 else 6])
        )
    (root / "test_batch.bin").write_bytes(b"".join(records("val")))
    (root / "batches.meta.txt").write_text("a\nb\nc\n")
    return root


def make_hub(root: Path) -> Path:
    datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abc"))})

    def table(split):
        rows = {"image": [{"bytes": data, "path": None} for data in files_of(split)], "label": LABELS[split]}
        return datasets.Dataset.from_dict(rows, features=features)

    datasets.DatasetDict({split: table(split) for split in LABELS}).save_to_disk(str(root / "saved"))
    return root / "saved"


MAKERS: dict[str, Callable[[Path], Path]] = {
    "folder": make_folder,
    "tar-folder": make_tar_folder,
    "webdataset": make_webdataset,
    "pack": make_pack,
    "npz": make_npz,
    "idx": make_idx,
    "cifar": make_cifar,
    "hub": make_hub,
}
