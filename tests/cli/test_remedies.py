"""Every flag and command that an error proposes exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fathoms
from fathoms.cli.flags.parse import names_of
from fathoms.cli.main import COMMANDS, module_of

SOURCE = Path(fathoms.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w{-])")
COMMAND = re.compile(r"`fathoms ([^`]*)`")
# Flags of torchrun, of everybody, and of timm's own training script.
OTHERS = {"--max-restarts", "--help", "--pretrained-path"}


def flags():
    known = set(OTHERS)
    for command in COMMANDS:
        own, _ = names_of(module_of(command).Args)
        known |= {*own, *(f"--no-{flag[2:]}" for flag in own)}
    return known


def texts(node):
    """The string constants inside an expression; a placeholder for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from texts(part.value)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def messages():
    """Every text of every error that is raised or built, with its file."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
                for argument in node.args:
                    for text in texts(argument):
                        yield path.relative_to(SOURCE), text


def test_every_flag_in_an_error_exists():
    known = flags()
    found = {(str(path), flag) for path, text in messages() for flag in FLAG.findall(text)}
    assert len(found) > 100
    assert {entry for entry in found if entry[1] not in known} == set()


def test_every_command_in_an_error_exists():
    named = {(str(path), words) for path, text in messages() for words in COMMAND.findall(text)}
    assert named
    lost = [
        entry
        for entry in named
        if entry[1] != "--help" and not any(f"{entry[1]} ".startswith(f"{name} ") for name in COMMANDS)
    ]
    assert lost == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_in_an_example_or_a_help_text_exists(command):
    module = module_of(command)
    known = flags() | {"--nproc-per-node"}
    text = f"{module.__doc__} {module.EXAMPLES}"
    assert [flag for flag in FLAG.findall(text) if flag not in known] == []
