"""Public names: one list for the runtime, the same for type checkers, and all of them exist."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import fathoms
from fathoms.names.registry import Registry


def test_type_checkers_see_the_names_that_the_runtime_loads():
    tree = ast.parse(Path(fathoms.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {**fathoms._HOMES, "parts": "fathoms"}


@pytest.mark.parametrize("room", ["", ".evaluate", ".export", ".probes", ".report"])
def test_every_declared_name_exists(room):
    module = importlib.import_module(f"fathoms{room}")
    for name in module.__all__:
        assert getattr(module, name) is not None


PUBLIC = {
    **{f"fathoms.{name}": getattr(fathoms, name) for name in fathoms.__all__},
    **{f"fathoms.parts.{name}": getattr(fathoms.parts, name) for name in fathoms.parts.__all__},
}


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if not isinstance(value, Registry)])
def test_every_public_name_says_what_it_is_with_an_example(name):
    """tests/test_house.py runs all examples."""
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text.partition("\n")[0].endswith((".", ":"))
    assert ">>> " in text


def test_the_package_declares_its_types():
    assert (Path(fathoms.__file__).parent / "py.typed").is_file()
