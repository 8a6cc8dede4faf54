"""Photos of two classes, and a run that was trained on them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fathoms.cli.main import main

TINY = ["--model", "vit_tiny_patch16_224", "--depth", "1", "--dim", "24", "--image-size", "32"]
QUICK = ["--epochs", "1", "--batch-size", "8", "--device", "cpu"]


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Two classes that differ in the colour of their middle; the rim is green."""
    root = tmp_path_factory.mktemp("validate") / "photos"
    rng = np.random.default_rng(0)
    for split, number in (("train", 12), ("val", 6)):
        for index, name in enumerate(("blue", "red")):
            (root / split / name).mkdir(parents=True)
            for image in range(number):
                pixels = rng.integers(0, 60, (48, 48, 3), dtype=np.uint8)
                pixels[..., 1] += 120
                pixels[12:36, 12:36, 2 - 2 * index] += 190
                Image.fromarray(pixels).save(root / split / name / f"{image}.png")
    return root


@pytest.fixture(scope="session")
def vit(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = [*TINY, *QUICK, "--output", str(folder), "--experiment", "vit"]
    assert main(["train", str(photos), *words]) == 0
    return folder / "vit"
