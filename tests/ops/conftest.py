"""Fixtures of the kernel tests."""

import pytest
import torch

from fathoms.ops.dispatch import interpreting


@pytest.fixture
def device(kernel_device):
    """The type of the device that kernel tests run on."""
    return kernel_device.type


@pytest.fixture
def nan_filled():
    """New tensors are full of NaN, so that an element that no program wrote shows."""
    # On a GPU cuBLAS would refuse to run the reference.
    if interpreting():
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
