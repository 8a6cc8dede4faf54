"""Normalise, erase and mix by a kernel: the numbers of plain torch.

Without a GPU the kernel runs in Triton's interpreter, in a process of its own (`report`).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fathoms.data.augment.erase import draw_rectangles
from fathoms.data.augment.finish import Erasing, Finish, finish
from fathoms.data.augment.mix import MixOptions, draw_mixture
from fathoms.data.counter_rng import generator, sample_keys

# name: (height, width), how erased with how many rectangles at most, how mixed, dtype
CASES = {
    "plain": ((17, 23), None, None, "float32"),
    "const": ((32, 32), ("const", 1), None, "float32"),
    "rand_thrice": ((32, 32), ("rand", 3), None, "float32"),
    "pixel": ((40, 33), ("pixel", 1), None, "float32"),
    "mixed_as_a_batch": ((9, 31), None, MixOptions(mixup=0.8), "float32"),
    "cut_and_mixed": ((32, 32), None, MixOptions(mixup=0.8, cutmix=1.0, mode="elem"), "float32"),
    "seldom": ((16, 16), ("const", 1), MixOptions(mixup=0.8, cutmix=1.0, prob=0.4, mode="elem"), "float32"),
    "all_in_bfloat16": ((33, 40), ("pixel", 2), MixOptions(cutmix=1.0, mode="pair"), "bfloat16"),
    "one_pixel": ((1, 1), ("pixel", 1), MixOptions(mixup=1.0), "float32"),
}


def make(name, device="cpu", count=12):
    """Arguments of `finish`."""
    (height, width), erased, mixed, dtype = CASES[name]
    torch.manual_seed(0)
    images = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8).to(device)
    scale, shift = (torch.randn(3, 1, 1).to(device) / size for size in (64, 1))
    erasing = mixture = None
    if erased is not None:
        keys = sample_keys(0, 0, "erase", np.arange(count))
        erasing = Erasing(draw_rectangles(keys, 0.7, erased[1], height, width), erased[0], keys)
    if mixed is not None:
        mixture = draw_mixture(mixed, generator(0, 0, "mix"), count, height, width)
    return images, scale, shift, getattr(torch, dtype), Finish(erasing, mixture)


def difference(name, device="cpu"):
    """Largest difference, and how many numbers the rectangles and partners changed."""
    from fathoms.data.device.triton.finish import finish as fused

    given = make(name, device)
    found, plain = fused(*given), finish(*given)
    alone = finish(*given[:4], Finish(None, None))
    return {
        "apart": (found.float() - plain.float()).abs().max().item(),
        "dtype": str(found.dtype).removeprefix("torch."),
        "changed": int((plain != alone).sum()),
    }


@pytest.mark.parametrize("name", CASES)
def test_the_interpreted_kernel_gives_torch_s_numbers(report, name):
    check(report[name], name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_the_device_kernel_gives_torch_s_numbers(name):
    check(difference(name, "cuda"), name)


def check(found, name):
    dtype = CASES[name][3]
    # Numbers reach about 8, where bfloat16 has steps of 1/32; torch's form rounds before it mixes, too.
    assert found["apart"] < (0.05 if dtype == "bfloat16" else 2e-5), found
    assert found["dtype"] == dtype
    assert (found["changed"] > 0) == (name != "plain"), found


if __name__ == "__main__":
    print(json.dumps({name: difference(name) for name in CASES}))
