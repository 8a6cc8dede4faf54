"""Errors name what the user typed: a flag of some command, a field of a config, or a public argument."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from fathoms.cli.main import COMMANDS, module_of
from fathoms.data.loader import LoaderOptions
from fathoms.models.config import ViTConfig
from fathoms.training.job import RunOptions
from fathoms.training.recipe import Recipe

SOURCE = Path(__file__).parents[1] / "src" / "fathoms"
FORBIDDEN = ("train.", "data.", "model.", "recipe.", "bench.", "run.")
ERRORS = ("ConfigError", "UnknownNameError")
# Functions with the name of the place among their arguments: its position.
CHECKS = {"check_name": 3, "check": 1, "check_types": 1, "check_choices": 1, "check_field": 3}


def flags_of(args: type) -> set[str]:
    """The flags of a command's dataclass, with those of the dataclasses inside it."""
    names: set[str] = set()
    for field, hint in typing.get_type_hints(args).items():
        inner = flags_of(hint) if dataclasses.is_dataclass(hint) else {f"--{field.replace('_', '-')}"}
        names |= inner
    return names


def all_flags() -> set[str]:
    modules = [module_of(name) for name in COMMANDS]
    aliases = {alias for module in modules for alias in getattr(module, "ALIASES", {})}
    return aliases.union(*(flags_of(module.Args) for module in modules)) | {"--help"}


def first_piece(node: ast.expr | None) -> str:
    """The literal text that a string or f-string begins with."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0] if node.values else None
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def prefixes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first piece of every message, and of every place that is given to a check."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [word.value for word in node.keywords if word.arg in ("where", "flag")]
        if name in ERRORS:
            given += node.args[:1]
        elif name in CHECKS:
            given += node.args[CHECKS[name] :][:1]
        for text in given:
            yield node.lineno, first_piece(text)


def public_names(trees: list[ast.Module]) -> set[str]:
    """Arguments, functions, classes, files and registered kinds, as a user of the library writes them."""
    names = {path.stem for path in SOURCE.rglob("*.py")}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.add(node.name)
        if isinstance(node, ast.FunctionDef):
            names |= {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Registry":
            names.add(first_piece(node.args[0]))
    return names


def fault(text: str, flags: set[str], names: set[str]) -> str | None:
    """The leading name that nobody can have typed, or None."""
    if text.startswith(FORBIDDEN):
        return text
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
        if flag not in flags:
            return flag
    word = re.match(r"([a-zA-Z_][\w.]*)[=:]", text)
    return word[1] if word and word[1] not in names else None


@pytest.fixture(scope="module")
def known():
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    configs = (ViTConfig, Recipe, RunOptions, LoaderOptions)
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    return all_flags(), fields | public_names(trees)


def test_every_error_begins_with_a_flag_a_field_or_a_public_argument(known):
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = str(path.relative_to(SOURCE))
        for line, text in prefixes(ast.parse(path.read_text())):
            found = fault(text, *known)
            wrong += [f"{place}:{line}: {found!r} in {text!r}"] if found else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('raise ConfigError("train.lr=0 is not a learning rate")', "train.lr=0 is not a learning rate"),
        ('raise ConfigError(f"model.dim={dim} is odd")', "model.dim="),
        ('raise ConfigError("--learning-rate 0: raise it")', "--learning-rate"),
        ('raise UnknownNameError("wibble: no such part")', "wibble"),
        ('check_name(opt, OPTIONS, "optimizer", "train.opt")', "train.opt"),
        ('OPTIMIZERS.check(name, where="train.opt")', "train.opt"),
        ('raise ConfigError(f"--lr {lr}: use a learning rate above zero")', None),
        ('raise ConfigError(f"dim={dim} is not divisible by heads={heads}")', None),
        ('raise ConfigError(f"{path}: no such file")', None),
    ],
)
def test_the_scan_finds_a_prefix_that_nobody_typed(known, code, found):
    assert [fault(text, *known) for _, text in prefixes(ast.parse(code))] == [found]
