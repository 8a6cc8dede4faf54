"""Public names: one list for the runtime, the same for type checkers, and all of them exist."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import nn

import fathoms
from fathoms.registry import Registry


@pytest.mark.parametrize("room", ["", ".data"])
def test_type_checkers_see_the_names_that_the_runtime_loads(room):
    module = importlib.import_module(f"fathoms{room}")
    tree = ast.parse(Path(module.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    seen = {
        alias.name: node.module.removeprefix(f"fathoms{room}.") for node in imports for alias in node.names
    }
    homes = {name: home.removeprefix(f"fathoms{room}.") for name, home in module._HOMES.items()}
    assert seen == {**homes, **({} if room else {"parts": "fathoms"})}


@pytest.mark.parametrize("room", ["", ".data", ".exporting", ".probes", ".report"])
def test_every_declared_name_exists(room):
    module = importlib.import_module(f"fathoms{room}")
    for name in module.__all__:
        assert getattr(module, name) is not None


PUBLIC = {
    **{f"fathoms.{name}": getattr(fathoms, name) for name in fathoms.__all__},
    **{f"fathoms.parts.{name}": getattr(fathoms.parts, name) for name in fathoms.parts.__all__},
}


@pytest.mark.parametrize(
    "name", [name for name, value in PUBLIC.items() if not isinstance(value, Registry | tuple)]
)
def test_every_public_name_says_what_it_is_with_an_example(name):
    """tests/test_house.py runs all examples."""
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text.partition("\n")[0].endswith((".", ":"))
    assert ">>> " in text


def tensors(value):
    """Arguments and result of what a public name runs that are tensors, each with its annotation."""
    if inspect.isclass(value):
        calls = [value.__init__, *([value.forward] if issubclass(value, nn.Module) else [])]
    else:
        calls = [value] if callable(value) else []
    for call in calls:
        signature = inspect.signature(call)
        found = {name: kind.annotation for name, kind in signature.parameters.items()}
        yield from ((name, str(kind)) for name, kind in found.items() if "Tensor" in str(kind))
        if "Tensor" in str(signature.return_annotation):
            yield "return", str(signature.return_annotation)


def without_shape(value):
    """Tensors of a public name whose shape is neither in the annotation nor in the line about the argument."""
    text = inspect.getdoc(value) or ""
    told = {
        name for name, _, line in (each.strip().partition(": ") for each in text.splitlines()) if "(B" in line
    }
    return [name for name, kind in tensors(value) if "Tensor, " not in kind and name not in told]


@pytest.mark.parametrize("name", list(PUBLIC))
def test_every_tensor_of_a_public_name_has_a_shape(name):
    assert without_shape(PUBLIC[name]) == []


def test_a_tensor_without_a_shape_is_found():
    class Bare(nn.Module):
        def forward(self, x: torch.Tensor, y: Float[torch.Tensor, "B D"]) -> torch.Tensor:
            return x + y

    assert without_shape(Bare) == ["x", "return"]
    assert sum(1 for value in PUBLIC.values() for _ in tensors(value)) > 80


def test_the_package_declares_its_types():
    assert (Path(fathoms.__file__).parent / "py.typed").is_file()
