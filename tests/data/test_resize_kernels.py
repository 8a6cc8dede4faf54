"""The kernels that crop, resize and flip, against plain torch: one level apart where a sum falls between two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fathoms.data.images.pixels import PixelLayout, as_words, ragged, resize_boxes

SIZES = ((40, 50), (31, 22), (64, 64), (1, 9), (130, 20), (24, 24), (3, 2))
# Inside, exact, and outside on every side, even wholly: what lies there is black.
BOXES = (
    (3, 4, 30, 40),
    (0, 0, 31, 22),
    (-2, 5, 64, 64),
    (0, 0, 1, 9),
    (-5, -4, 140, 30),
    (0, 0, 24, 24),
    (-9, 4, 5, 3),
)
# name: side of the result, and whether all boxes have it already
CASES = {
    "smaller": (7, "as they are"),
    "larger": (70, "as they are"),
    "same": (24, "as they are"),
    "one_pixel": (1, "as they are"),
    "copied": (16, "of that side"),
}


def make(case, device):
    """Words and places; over the cases every image meets both filters and is flipped or not."""
    size, boxes_are = CASES[case]
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIZES]
    flat, offset, sizes = ragged(images)
    box = np.array(BOXES)
    if boxes_are == "of that side":
        box[:, 2:] = size
    turn = np.arange(len(box)) + list(CASES).index(case)
    flip, cubic = turn % 2 == 0, turn // 2 % 2 == 0
    words = as_words(torch.from_numpy(flat)).view(-1).to(device)
    return words, PixelLayout(offset, sizes[:, 1], sizes, box, flip, cubic), size


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
def test_kernels_give_torch_s_pixels(kernel_device, case):
    from fathoms.data.augment.launches import resize_boxes as fused

    given = make(case, kernel_device)
    apart = (fused(*given).int() - resize_boxes(*given).int()).abs()
    assert apart.max() <= (0 if case == "copied" else 1)
    assert (apart > 0).float().mean() < 0.02
