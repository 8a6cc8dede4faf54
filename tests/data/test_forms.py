"""Who does the device's work: chosen by name, refused with the reason, and the same batches in the end."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fathoms.data import ArraySource, Augment, AugmentOptions, CropOptions, MixOptions, Plan, ResidentLoader
from fathoms.data.device.backend import choose_forms
from fathoms.errors import ConfigError, UnknownNameError

CROPS = {"pad": CropOptions(mode="pad"), "resized": CropOptions()}


def batches(kernels, crop, device="cpu"):
    """An epoch of two steps, with everything switched on."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, 20, 20, 3), dtype=np.uint8)
    source = ArraySource("npz", "train", images, np.arange(16) % 4, list("abcd"))
    mixing = MixOptions(mixup=0.8, cutmix=1.0, mode="elem")
    options = AugmentOptions(
        aa="rand-m9-n3-p0.9-mstd0.5-inc1",
        color_jitter=(0.4, 0.4, 0.4, 0.1),
        reprob=0.5,
        remode="pixel",
        mix=mixing,
    )
    augment = Augment(options, classes=4, device=device, kernels=kernels)
    return list(ResidentLoader(source, Plan(16, 8), 20, CROPS[crop], augment, device).epoch(0))


def distances(crop, device="cpu"):
    """How far batches by kernels are from those by plain torch, step by step."""
    pairs = zip(batches("triton", crop, device), batches("torch", crop, device), strict=True)
    return [
        {
            "pictures": (fused.images - plain.images).abs().mean().item(),
            "targets": (fused.targets - plain.targets).abs().max().item(),
            "ids": fused.ids.tolist() == plain.ids.tolist(),
        }
        for fused, plain in pairs
    ]


def check(found):
    assert len(found) == 2
    for step in found:
        # A level of 255 is 0.017 here; one may differ where a sum falls between two, and what follows may spread it.
        assert step["pictures"] < 0.002, found
        assert step["targets"] == 0
        assert step["ids"]


@pytest.mark.parametrize("crop", CROPS)
def test_interpreted_kernels_make_torch_s_batches(report, crop):
    check(report[crop])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("crop", CROPS)
def test_device_kernels_make_torch_s_batches(crop):
    check(distances(crop, "cuda"))


def test_a_cpu_goes_picture_by_picture_and_says_so_if_kernels_are_asked_for():
    assert choose_forms("auto", torch.device("cpu")).name == "picture by picture"
    assert choose_forms("torch", torch.device("cpu")).name == "torch"
    assert choose_forms("auto", torch.device("meta")).name == "torch"
    with pytest.raises(ConfigError, match=r"data.kernels='triton' cannot run: .*; use 'auto'"):
        Augment(AugmentOptions(), kernels="triton")
    with pytest.raises(UnknownNameError, match="did you mean 'triton'"):
        Augment(AugmentOptions(), kernels="tritn")


if __name__ == "__main__":
    print(json.dumps({crop: distances(crop) for crop in CROPS}))
