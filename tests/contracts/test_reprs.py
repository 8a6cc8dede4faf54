"""The repr of every part: its arguments, never just its name. A new part gets these tests by being registered."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from fathoms import ViT, ViTConfig
from fathoms.parts import LayerScale, LearnableScaler, ReZero, families

SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "heads": 4, "depth": 2, "num_classes": 5}
PARTS = [
    (field, name)
    for field, family in families().items()
    for name in family
    if isinstance(family[name], type) and issubclass(family[name], nn.Module)
]


def model_with(field, name):
    options = {field: name}
    if field == "residual":
        placement = families()[field].metadata(name).placements[0]
        options |= {"attn_placement": placement, "mlp_placement": placement}
    if (field, name) == ("attention", "class_attention"):
        options = {"readout": name}
    return ViT(ViTConfig(**SMALL | options))


@pytest.mark.parametrize(("field", "name"), PARTS, ids=str)
def test_a_part_prints_what_it_is(field, name):
    kind = families()[field][name]
    part = next(module for module in model_with(field, name).modules() if type(module) is kind)
    first, *children = repr(part).splitlines()
    if children:
        # A part of parts prints theirs; its own arguments come first, in a line of their own.
        assert any(letter.isdigit() for letter in "".join(children))
    else:
        assert any(letter.isdigit() for letter in first), first


def test_arguments_read_as_they_are_written():
    assert repr(LayerScale(768)) == "LayerScale(768, init_value=1e-4)"
    assert repr(LayerScale(192, init_value=1e-6)) == "LayerScale(192, init_value=1e-6)"
    assert repr(ReZero(8)) == "ReZero(8, init_value=0.0)"
    assert repr(LearnableScaler(8, init="ones")) == "LearnableScaler(8, eps=1e-6, init='ones')"


def test_no_leaf_of_any_model_prints_its_name_alone():
    for field, name in PARTS:
        for module in model_with(field, name).modules():
            kind = type(module)
            takes = len(inspect.signature(kind.__init__).parameters) > 1
            if kind.__module__.startswith("fathoms.parts") and takes and not list(module.children()):
                assert repr(module) != f"{kind.__name__}()"
