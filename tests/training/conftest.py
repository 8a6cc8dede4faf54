"""A small folder of photos that several files train on."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder data set of two classes that differ in colour."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for index, name in enumerate(("blue", "red")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 90, (40, 48, 3), dtype=np.uint8)
                pixels[..., 2 - 2 * index] += 150
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
    return root
