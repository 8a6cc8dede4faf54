"""The backend of device-side work: chosen by name, refused with the reason, the same batches from each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fathoms.data import ArraySource, Augment, AugmentOptions, CropOptions, DeviceLoader, MixOptions, Sampler
from fathoms.data.augment.pipeline import choose_backend
from fathoms.errors import ConfigError, UnknownNameError

CROPS = {"pad": CropOptions(crop="pad"), "resized": CropOptions()}


def batches(impl, crop, device):
    """An epoch of two batches, with everything switched on."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, 20, 20, 3), dtype=np.uint8)
    source = ArraySource("npz", "train", images, np.arange(16) % 4, list("abcd"))
    mixing = MixOptions(mixup=0.8, cutmix=1.0, mixup_mode="elem")
    options = AugmentOptions(
        aa="rand-m9-n3-p0.9-mstd0.5-inc1",
        color_jitter=(0.4, 0.4, 0.4, 0.1),
        reprob=0.5,
        remode="pixel",
        mix=mixing,
    )
    augment = Augment(options, classes=4, device=device, backend=choose_backend(impl, device))
    return list(DeviceLoader(source, Sampler(16, 8), 20, CROPS[crop], augment, device).epoch(0))


@pytest.mark.kernels
@pytest.mark.parametrize("crop", CROPS)
def test_kernels_make_the_reference_s_batches(kernel_device, crop):
    pairs = list(
        zip(batches("triton", crop, kernel_device), batches("torch", crop, kernel_device), strict=True)
    )
    assert len(pairs) == 2
    for fused, plain in pairs:
        # A level of 255 is 0.017 here; one may differ where a sum falls between two, and what follows may spread it.
        assert (fused.images - plain.images).abs().mean() < 0.002
        assert torch.equal(fused.targets, plain.targets)
        assert fused.ids.tolist() == plain.ids.tolist()


def test_kernels_are_chosen_where_they_run_and_refused_elsewhere_with_the_reason():
    for name in ("cpu", "meta", "mps"):
        assert choose_backend("auto", torch.device(name)).name == "torch"
    with pytest.raises(ConfigError, match=r'impl="triton" cannot run: .*; use impl="auto"'):
        choose_backend("triton", torch.device("cpu"))
    with pytest.raises(UnknownNameError, match="did you mean 'triton'"):
        choose_backend("tritn", torch.device("cpu"))
