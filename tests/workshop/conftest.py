"""The scripts of website/ and benchmarks/ as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "website", ROOT / "benchmarks")


@pytest.fixture
def script(monkeypatch):
    """A script as a module; it and those it imports are forgotten afterwards."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        place = getattr(sys.modules[name], "__file__", None)
        if place and Path(place).parent in FOLDERS:
            del sys.modules[name]
