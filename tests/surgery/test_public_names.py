"""The public names of surgery and of its rooms."""

from __future__ import annotations

import pytest

import fathoms
from fathoms import surgery
from fathoms.surgery import accelerate, fold, swap


@pytest.mark.parametrize("room", [surgery, fold, swap, accelerate], ids=lambda room: room.__name__)
def test_every_declared_name_is_there(room):
    assert room.__all__ == sorted(room.__all__)
    assert all(getattr(room, name) is not None for name in room.__all__)


def test_the_functions_at_the_top_are_those_of_the_rooms():
    assert fathoms.fold is fold.fold
    assert fathoms.accelerate is accelerate.accelerate
    assert fathoms.swap_norms is swap.swap_norms is surgery.swap_norms
    assert fathoms.taper is swap.taper is surgery.taper


def test_a_name_that_is_not_declared_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fathoms.surgery' has no attribute 'graft'"):
        surgery.graft  # noqa: B018
