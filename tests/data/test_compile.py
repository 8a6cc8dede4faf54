"""Compiled operations give the pixels of the written ones."""

import numpy as np
import pytest
import torch

from fathoms.data.augment.batched import apply_layer, compiled_kernels
from fathoms.data.augment.policy import Layer
from fathoms.data.crop.packed_rgb import as_words
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.device.resize import ragged, resize_boxes


# The others were compared with torch 2.11 and 2.15 and agree; compiling all takes a minute. Saturation once did not.
@pytest.mark.compile
@pytest.mark.parametrize("kind", ["shear_x", "colour"])
def test_compiled_operations_agree_with_written_ones(kind):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8, generator=generator)
    layer = Layer({kind: np.arange(5)}, np.linspace(0.1, 0.3, 5), np.arange(5) % 2 == 0)
    fill = torch.tensor([1, 2, 3], dtype=torch.uint8)
    written = apply_layer(images.clone(), layer, fill)
    compiled = apply_layer(images.clone(), layer, fill, compiled_kernels())
    difference = (written.int() - compiled.int()).abs()
    # Fused multiply-add changes the last bit before the fraction is cut off.
    assert difference.max() <= 1
    assert difference.float().mean() < 0.05


@pytest.mark.compile
def test_the_compiled_resize_agrees_with_the_written_one():
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((40, 50), (31, 22), (64, 64))]
    flat, offset, sizes = ragged(pictures)
    boxes = np.array([[3, 4, 30, 40], [0, 0, 31, 22], [-2, 5, 64, 64]])
    flips, cubic = np.array([True, False, True]), np.array([True, False, False])
    places = Places(offset, sizes[:, 1], sizes, boxes, flips, cubic)
    written = resize_boxes(as_words(torch.from_numpy(flat)), places, 24)
    compiled = resize_boxes(as_words(torch.from_numpy(flat)), places, 24, compile="inductor")
    assert (written.int() - compiled.int()).abs().max() <= 1
