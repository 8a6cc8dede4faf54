"""Registries: names, metadata, building, and the errors of unknown names."""

from __future__ import annotations

import pytest

from fathoms import FathomsError
from fathoms.registry import Registry, check_name, nearest


def shapes():
    registry: Registry[dict, int] = Registry("shape", default=2)

    @registry.add("square")
    def square(side, colour="red"):
        """All sides equal.

        More on squares.
        """
        return {"side": side, "colour": colour}

    @registry.add("cube", 3, "Six squares.")
    def cube(side, **options):
        return {"side": side, **options}

    return registry


def test_metadata_is_what_was_registered_or_the_familys_default():
    assert [shapes().metadata(name) for name in shapes()] == [2, 3]
    assert Registry("shape").add("dot")(dict) is dict


def test_metadata_that_counts_as_false_is_kept():
    registry = Registry("shape", default=2)
    registry.add("point", 0)(dict)
    assert registry.metadata("point") == 0


def test_a_summary_is_given_or_the_first_line_of_the_docstring():
    assert [shapes().summary(name) for name in shapes()] == ["All sides equal.", "Six squares."]


def test_build_passes_options_on_and_none_keeps_the_default():
    assert shapes().build("square", 2, colour="blue") == {"side": 2, "colour": "blue"}
    assert shapes().build("square", 2, colour=None) == {"side": 2, "colour": "red"}
    assert shapes().build("cube", 2, glass=True) == {"side": 2, "glass": True}


def test_an_option_that_the_part_does_not_take_is_refused():
    with pytest.raises(FathomsError, match="shape 'square' takes no glass; leave it out"):
        shapes().build("square", 2, glass=True)


def test_a_name_is_registered_once():
    registry = shapes()
    with pytest.raises(FathomsError, match="shape 'square' is registered already"):
        registry.add("square")(dict)


@pytest.mark.parametrize("look_up", ["__getitem__", "metadata", "summary", "build", "check"])
def test_every_lookup_of_an_unknown_name_raises_with_the_nearest(look_up):
    with pytest.raises(FathomsError, match=r"^no shape is called 'squire'; did you mean 'square'\?$"):
        getattr(shapes(), look_up)("squire")


@pytest.mark.plain
def test_an_error_names_the_argument_and_shortens_what_is_not_a_name():
    with pytest.raises(FathomsError, match="^stem_norm: no shape is called 'x"):
        shapes().check("x" * 5000, "stem_norm")
    with pytest.raises(FathomsError, match=r"no shape is called \[0, 1, 2, 3, 4, 5, \.\.\.\]"):
        check_name(list(range(5000)), ["square"], "shape")


def test_nearest_prefers_the_same_but_for_case_then_a_longer_name():
    assert nearest("CUBE", ["cubes", "cube"]) == "cube"
    assert nearest("cu", ["uc", "cuboid"]) == "cuboid"
    assert nearest("anything", []) == ""
