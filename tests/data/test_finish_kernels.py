"""The kernel that normalises, erases and mixes, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fathoms.data.augment.erase_and_mix import (
    Erasing,
    Finish,
    MixOptions,
    draw_mixture,
    draw_rectangles,
    finish,
)
from fathoms.data.counter_rng import generator, sample_keys

# name: (height, width), how erased with how many rectangles at most, how mixed, dtype
CASES = {
    "plain": ((17, 23), None, None, "float32"),
    "const": ((32, 32), ("const", 1), None, "float32"),
    "rand_thrice": ((32, 32), ("rand", 3), None, "float32"),
    "pixel": ((40, 33), ("pixel", 1), None, "float32"),
    "mixed_as_a_batch": ((9, 31), None, MixOptions(mixup=0.8), "float32"),
    "cut_and_mixed": ((32, 32), None, MixOptions(mixup=0.8, cutmix=1.0, mixup_mode="elem"), "float32"),
    "seldom": (
        (16, 16),
        ("const", 1),
        MixOptions(mixup=0.8, cutmix=1.0, mixup_prob=0.4, mixup_mode="elem"),
        "float32",
    ),
    "all_in_bfloat16": ((33, 40), ("pixel", 2), MixOptions(cutmix=1.0, mixup_mode="pair"), "bfloat16"),
    "one_pixel": ((1, 1), ("pixel", 1), MixOptions(mixup=1.0), "float32"),
}


def make(name, device, count=12):
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


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_torch_s_numbers(kernel_device, name):
    from fathoms.data.augment.launches import finish as fused

    given = make(name, kernel_device)
    found, plain = fused(*given), finish(*given)
    assert found.dtype == given[3]
    # Numbers reach about 8, where bfloat16 has steps of 1/32; plain torch also rounds before it mixes.
    assert (found.float() - plain.float()).abs().max() < (0.05 if found.dtype == torch.bfloat16 else 2e-5)
    # Erasing and mixing have changed something, or the comparison would say nothing about them.
    untouched = torch.equal(plain, finish(*given[:4], Finish(None, None)))
    assert untouched == (name == "plain")
