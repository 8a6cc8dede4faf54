"""The house itself: short files, imports that point one way, commands that exist, a quick start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_files_are_short_and_say_what_they_are_about(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a file says what it is about in its first line"


@pytest.mark.parametrize("mark", ["TODO", "FIXME", "XXX", "NotImplementedError", "import *"])
def test_nothing_is_left_for_later(mark):
    assert not [str(path) for path in SOURCES if mark in path.read_text()]


def test_no_file_is_called_utils():
    assert not [path for path in SOURCES if path.stem in ("utils", "helpers", "misc", "common")]


def test_imports_point_one_way():
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_the_readmes_commands_exist():
    from fathoms.cli.main import COMMANDS

    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"\bmake (\w+)", text))
    assert {"demo", "test"} <= made <= targets
    used = set(re.findall(r"^\s*fathoms ([a-z]+(?: (?:check|pack|info))?)", text, re.MULTILINE))
    assert used
    assert used <= set(COMMANDS)
    for script in re.findall(r"python (\w+/\w+\.py)", text):
        assert (ROOT / script).is_file()


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "RELIABILITY.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
    rows = [line for line in text.splitlines() if line.startswith("| ") and "held by" not in line]
    assert all("`tests/" in row or row.endswith("| the same |") for row in rows)
    for script in re.findall(r"python (\w+/\w+\.py)", text):
        assert (ROOT / script).is_file()


def test_what_security_promises_names_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"(test_\w+\.py)", text)) <= set(files)
    # "…" stands for the file of the row above.
    file, named = "", 0
    for found in re.finditer(r"(…|[\w/]+\.py)::(\w+)`", text):
        file = file if found[1] == "…" else found[1].rpartition("/")[2]
        assert f"def {found[2]}(" in files[file], found[0]
        named += 1
    assert named > 10


def test_import_fathoms_adds_little_to_import_torch():
    """Under 0.3 s, best of three, in seconds of the process itself, whatever else the machine does."""
    code = (
        "import time, torch; start = time.process_time(); import fathoms; print(time.process_time() - start)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.3


def test_every_command_has_a_module_with_its_three_parts():

    from fathoms.cli.main import COMMANDS, module_of

    for name in COMMANDS:
        module = module_of(name)
        assert module.EXAMPLES.strip().startswith(f"fathoms {name}")
        assert callable(module.run)
        assert module.Args


def test_public_docstring_examples_run(monkeypatch):
    import doctest
    import importlib

    # Some examples read results/ of the repository.
    monkeypatch.chdir(ROOT)

    shown = [path for path in SOURCES if ">>> " in path.read_text()]
    assert len(shown) > 20
    for path in shown:
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted, name
        assert result.failed == 0, name
