"""Public names: one list for the runtime, the same for type checkers, and all of them exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import fathoms


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


def test_the_package_declares_its_types():
    assert (Path(fathoms.__file__).parent / "py.typed").is_file()
