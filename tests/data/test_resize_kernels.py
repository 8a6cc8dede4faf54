"""Crop, resize and mirror by kernels: the pixels of plain torch, but for a level where a sum falls between two.

Without a GPU the kernels run in Triton's interpreter, in a process of their own (`report`).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fathoms.data.crop.packed_rgb import as_words
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.device.resize import ragged, resize_boxes

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


def make(case, device="cpu"):
    """Words and places; over the cases every picture meets both filters and is mirrored or not."""
    size, boxes_are = CASES[case]
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIZES]
    flat, offset, sizes = ragged(pictures)
    box = np.array(BOXES)
    if boxes_are == "of that side":
        box[:, 2:] = size
    turn = np.arange(len(box)) + list(CASES).index(case)
    flip, cubic = turn % 2 == 0, turn // 2 % 2 == 0
    words = as_words(torch.from_numpy(flat)).view(-1).to(device)
    return words, Places(offset, sizes[:, 1], sizes, box, flip, cubic), size


def difference(case, device="cpu"):
    """Largest difference in levels, and the share of values that differ."""
    from fathoms.data.device.triton.resize import resize_boxes as fused

    given = make(case, device)
    apart = (fused(*given).int() - resize_boxes(*given).int()).abs()
    return {"largest": int(apart.max()), "share": float((apart > 0).float().mean())}


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_give_torch_s_pixels(report, case):
    check(report[case], case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_device_kernels_give_torch_s_pixels(case):
    check(difference(case, "cuda"), case)


def check(found, case):
    assert found["largest"] <= (0 if case == "copied" else 1), found
    assert found["share"] < 0.005, found


if __name__ == "__main__":
    print(json.dumps({case: difference(case) for case in CASES}))
