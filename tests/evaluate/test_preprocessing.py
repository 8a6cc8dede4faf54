"""Preprocessing of a recipe: its defaults, and values that are refused."""

from __future__ import annotations

import pytest

from fathoms import FathomsError
from fathoms.evaluate.preprocessing import Preprocessing
from fathoms.train.recipe.recipe import Recipe


def test_the_look_of_no_recipe_is_that_of_a_recipe_without_changes():
    assert Preprocessing() == Preprocessing.of(Recipe().to_dict())


@pytest.mark.plain
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"std": [0.2, 0.0, 0.2]}, "crop_pct and std must be above zero"),
        ({"crop_pct": -1.0}, "crop_pct and std must be above zero"),
        ({"mean": [0.5]}, r"preprocessing.mean=\(0.5,\) is not a list of 3 values"),
        ({"crop_pct": "all"}, "preprocessing.crop_pct='all' is not a number"),
        ({"interpolation": "bicubc"}, "did you mean 'bicubic'"),
    ],
    ids=str,
)
def test_preprocessing_that_cannot_be_is_refused(recipe, message):
    with pytest.raises(FathomsError, match=message):
        Preprocessing.of(recipe)
