"""Kernel tests: in Triton's interpreter on the CPU under TRITON_INTERPRET=1, or on a GPU."""

import pytest
import torch

from fathoms.ops.dispatch import HAS_TRITON, interpreting


def pytest_runtest_setup(item):
    if item.get_closest_marker("kernels") is None:
        return
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if not interpreting() and not torch.cuda.is_available():
        pytest.skip("kernel tests run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m kernels")


@pytest.fixture
def device():
    """Where the kernels run."""
    return "cpu" if interpreting() else "cuda"


@pytest.fixture
def nan_filled():
    """New tensors are full of NaN, so that an element that no program wrote shows."""
    # On a GPU cuBLAS would refuse to run the reference.
    if interpreting():
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
