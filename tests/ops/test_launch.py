"""Launches of kernels: on which device, with which grid, on which layouts."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fathoms.ops.dispatch import MAX_PROGRAMS, launch


class Kernel:
    """Notes each start."""

    def __init__(self, seen):
        self.seen = seen

    def __getitem__(self, grid):
        return lambda *_arguments, **_compiled: self.seen.append(grid)


def test_a_kernel_starts_on_the_device_of_its_first_tensor(monkeypatch):
    seen, x = [], torch.zeros(3)

    @contextlib.contextmanager
    def device_of(tensor):
        seen.append(tensor)
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launch(Kernel(seen), (2, 1), x, 5)
    assert seen[0] is x
    assert seen[1:] == [(2, 1), "left"]


def test_a_grid_without_programs_is_not_started():
    seen = []
    launch(Kernel(seen), (2, 0, 3), torch.zeros(3))
    assert seen == []


# The run-time type checker changes the signatures that torch makes its custom ops of.
@pytest.mark.kernels
def test_an_image_beyond_32_bits_is_copied():
    """On the meta device, for such tensors have 4 GB and more."""
    pytest.importorskip("triton", reason="triton is not installed")
    from fathoms.ops.triton_talking_heads import rows

    near = torch.empty_strided((8, 2, 9, 16), (2**31, 16, 96, 1), device="meta")
    assert rows(near) is near
    # As tokens lie in a tensor (N, B, H, K) of many images, and heads in one (H, B, N, K).
    for strides in ((32, 16, 2**28 + 32, 1), (144, 2**31, 16, 1)):
        far = torch.empty_strided((8, 2, 9, 16), strides, device="meta")
        assert rows(far).is_contiguous()
    assert rows(near.transpose(2, 3)).is_contiguous()


@pytest.mark.kernels
def test_no_more_images_at_once_than_a_grid_has_room_for():
    pytest.importorskip("triton", reason="triton is not installed")
    from fathoms.ops.triton_talking_heads import _images, _parts

    windows = torch.empty(3 * MAX_PROGRAMS, 1, 4, 16, dtype=torch.bfloat16, device="meta")
    assert _images(windows) == MAX_PROGRAMS
    assert [part.stop - part.start for part in _parts(windows)] == 3 * [MAX_PROGRAMS]
