"""Pictures, folders and archives for the data tests; everything is made here, from seeds."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def make_photo(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    """A smooth colourful picture, different for each seed."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    if kind == "JPEG":
        options.setdefault("quality", 92)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def kernel_device():
    """Where Triton kernels run: the CPU in Triton's interpreter, which must be on from the first import, or a GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("kernel tests run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m kernels")
    return torch.device("cuda")


@pytest.fixture
def photo():
    return make_photo


@pytest.fixture
def encoded():
    return encode


@pytest.fixture
def shared_file():
    def find(name: str) -> Path:
        path = SHARED / name
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        return path

    return find


@pytest.fixture
def photo_folder(tmp_path):
    """48 training and 13 validation pictures in three classes, as files."""
    root = tmp_path / "photos"
    for split, count, start in (("train", 48, 0), ("val", 13, 1000)):
        for i in range(count):
            folder = root / split / ("ape", "bee", "cat")[i % 3]
            folder.mkdir(parents=True, exist_ok=True)
            height, width = 40 + 3 * (i % 7), 50 + 2 * (i % 5)
            (folder / f"{i:03d}.jpg").write_bytes(encode(make_photo(start + i, height, width)))
    return root


@pytest.fixture
def make_tar(tmp_path):
    """Write a tar from (name, bytes) pairs or ready-made TarInfo objects."""

    def write(name: str, entries) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w") as archive:
            for entry, data in entries:
                info = entry if isinstance(entry, tarfile.TarInfo) else tarfile.TarInfo(entry)
                if data is not None:
                    info.size = len(data)
                archive.addfile(info, io.BytesIO(data) if data is not None else None)
        return path

    return write
