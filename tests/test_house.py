"""The house itself: short files, imports that point one way, commands that exist, a quick start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


LATER = ("TODO", "FIXME", "XXX", "NotImplementedError", "import *")


def test_files_are_short_finished_and_say_in_name_and_first_line_what_they_are_about():
    for path in SOURCES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        assert ast.get_docstring(ast.parse(text)), path
        assert not [mark for mark in LATER if mark in text], path
        assert path.stem not in ("utils", "helpers", "misc", "common"), path


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


def test_import_fathoms_takes_a_tenth_of_a_second_and_no_torch():
    """Best of three, in seconds of the process itself, whatever else the machine does."""
    code = (
        "import sys, time; start = time.process_time(); import fathoms; "
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.1
    assert all(run.stdout.split()[1] == "False" for run in runs)


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
