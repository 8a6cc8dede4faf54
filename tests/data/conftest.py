"""Images, folders and archives for the data tests; everything is made here, from seeds."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CLASSES = ("ape", "bee", "cat", "dog")


def make_photo(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    """A smooth colourful image, different for each seed."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    if kind == "JPEG":
        options.setdefault("quality", 92)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def make_photograph(seed: int, label: int, height: int, width: int) -> Image.Image:
    """An image with a photograph's statistics: a 1/f spectrum, edges, saturated spots and sensor noise.

    The class is a faint slope of brightness and colour, so that a linear model is often right, not always.
    """
    rng = np.random.default_rng(seed)
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)
    frequency = np.hypot(down, across)
    frequency[0, 0] = np.inf
    spectrum = rng.normal(size=(3, *frequency.shape)) + 1j * rng.normal(size=(3, *frequency.shape))
    field = np.fft.irfft2(spectrum / frequency, (height, width))
    # Channels of a photograph are mostly alike.
    field = 0.8 * field.mean(0) + 0.4 * field
    out = 120 + 45 * field / field.std()
    y, x = np.mgrid[:height, :width] / max(height, width)
    for _ in range(6):
        inside = np.hypot(y - rng.random(), x - rng.random()) < rng.uniform(0.02, 0.2)
        out[:, inside] = 0.3 * out[:, inside] + 0.7 * rng.integers(0, 256, (3, 1))
    angle = 2 * np.pi * label / len(CLASSES)
    out += 40 * (np.cos(angle) * y + np.sin(angle) * x) * np.array([1.0, 0.6, 0.8])[:, None, None]
    out += rng.normal(0, 4, out.shape)
    return Image.fromarray(np.clip(out, 0, 255).astype(np.uint8).transpose(1, 2, 0))


@pytest.fixture
def photo():
    return make_photo


@pytest.fixture
def encoded():
    return encode


@pytest.fixture
def photograph_tar(make_tar):
    """Write a tar of photographs of many sizes: `write(height, train=8, val=4)`."""

    def write(height: int, **splits: int) -> Path:
        entries = []
        for start, (split, count) in enumerate(splits.items()):
            for i in range(count):
                seed, label = 10_000 * start + i, i % len(CLASSES)
                size = height + 7 * (i % 11), height + 13 * (i % 17)
                photograph = make_photograph(seed, label, *size)
                data = encode(photograph, quality=80 + i % 16, subsampling=i % 3, progressive=i % 5 == 0)
                entries.append((f"{split}/{CLASSES[label]}/{i:04d}.jpg", data))
        return make_tar("photographs.tar", entries)

    return write


@pytest.fixture
def photo_folder(tmp_path):
    """48 training and 13 validation images in three classes, as files."""
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
