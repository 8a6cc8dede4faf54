"""Pages of docs/: they say what the registries, the parsers and the imports say; the table beside other libraries."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from fathoms.cli.flags.parse import names_of, parse
from fathoms.cli.main import COMMANDS, module_of
from fathoms.parts import families

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALL_FLAGS = {flag for name in COMMANDS for flag in names_of(module_of(name).Args)[0]}


def section(name):
    """The part of the page of the commands that is about one."""
    return (DOCS / "commands.md").read_text().partition(f"\n## fathoms {name}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_flag_that_the_help_names_is_documented(name, capsys):
    module = module_of(name)
    with pytest.raises(SystemExit):
        parse(module, name, ["--help-all"])
    # A flag begins a line of the help.
    told = set(re.findall(r"^[│\s]*(--[a-z0-9][a-z0-9-]*)", capsys.readouterr().out, re.MULTILINE))
    assert len(told) >= len(names_of(module.Args)[0])
    page = section(name)
    for group in re.findall(r"\(#(options-[a-z-]+)", page):
        heading = group.replace("-", " ").capitalize()
        page += section("train").partition(f"### {heading}\n")[2].partition("\n### ")[0]
    shown = {"--help", "--help-all", *re.findall(r"`(--[a-z0-9-]+)`", page)}
    # A line of a help text may begin with the negative of a flag.
    assert {flag for flag in told - shown if flag.replace("--no-", "--") not in shown} == set()


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_row_of_a_command_says_what_its_flag_means(name):
    rows = [line for line in section(name).splitlines() if line.startswith("| `")]
    assert [row for row in rows if not row.split("|")[-2].strip()] == []


def test_a_flag_without_a_help_text_stops_the_generator(script):
    command_pages = script("command_pages")

    @dataclass(frozen=True)
    class Args:
        told: int = 1
        """What it is."""
        untold: int = 2

    assert command_pages._row(Args, Args, "told", int, ())[-1] == "What it is."
    with pytest.raises(KeyError, match="untold"):
        command_pages._row(Args, Args, "untold", int, ())


def test_the_flags_that_stand_for_those_of_others_exist():
    rows = [line for line in (DOCS / "coming_from.md").read_text().splitlines() if line.startswith("| ")]
    named = {flag for row in rows for flag in re.findall(r"--[a-z0-9][a-z0-9-]*", row.split(" | ")[1])}
    assert len(named) > 20
    switched_off = {f"--no-{flag.removeprefix('--')}" for flag in ALL_FLAGS}
    assert named - ALL_FLAGS - switched_off == set()


def test_an_unanswered_flag_of_another_script_stops_the_generator(script):
    coming_from = script("coming_from")
    other = {"looked_at": "nowhere", "flags": "--lr --flux", "means": [["--gone", "nothing"]]}
    with pytest.raises(
        ValueError, match=r"no answer for \['--flux'\]; answers for unknown flags \['--gone'\]"
    ):
        coming_from.flag_table("other", other)


def test_every_sentence_on_when_to_use_a_part_is_about_a_part_that_exists():
    when = tomllib.loads((ROOT / "website" / "when_to_use.toml").read_text())
    for family, sentences in when.items():
        assert set(sentences) <= set(families()[family])


def test_every_public_name_has_its_place_in_the_reference(script):
    import fathoms

    api_pages = script("api_pages")
    told = {name for names in api_pages.TOP.values() for name in names.split()}
    assert told == set(fathoms.__all__) - {"parts"}
    assert {"LayerScale", "patchify", "families"} <= {
        home.rpartition(".")[2] for homes in api_pages.groups().values() for home in homes
    }


def test_the_picture_of_the_architecture_has_only_arrows_that_point_down(script):
    architecture = script("architecture")
    edges = architecture.imports(ROOT)
    rooms = {path.parent.name for path in (ROOT / "src" / "fathoms").glob("*/__init__.py")}
    rows = architecture.levels({room: edges.get(room, set()) & rooms for room in rooms}, rooms)
    assert all(rows[room] < rows[to] for room in rooms for to in edges.get(room, set()) & rooms)
    assert architecture.reduced({"a": {"b", "c"}, "b": {"c"}}) == {"a": {"b"}, "b": {"c"}}


BESIDE = (ROOT / "docs" / "coming_from.md").read_text().partition("\n## timm\n")[0]
HERE = {
    cells[0]: cells[1:]
    for cells in (
        line.strip("| ").split(" | ") for line in BESIDE.partition("### What is here")[2].splitlines()
    )
    if len(cells) == 6 and set(cells[0]) != {"-"}
}
COUNTED = {
    "norms for ViTs by name": "norm",
    "residual rules": "residual",
    "norm placements": "attn_placement",
    "Dual PatchNorm, other patch norms": "stem_norm",
}


def test_every_feature_of_ours_links_to_a_test_that_exists():
    assert len(HERE) > 15
    for feature, (ours, *_) in HERE.items():
        linked = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", ours)
        assert linked, feature
        assert all("\ndef test_" in (ROOT / path).read_text() for path in linked), feature


@pytest.mark.parametrize("feature", list(COUNTED))
def test_the_numbers_of_parts_are_those_of_the_registry(feature):
    assert int(re.search(r"\d+", HERE[feature][0])[0]) == len(families()[COUNTED[feature]])


def test_each_of_the_others_is_named_with_the_version_looked_at():
    about = BESIDE.partition("\n### ")[0]
    for other in (
        r"timm \d+\.\d+\.\d+",
        r"deit at [0-9a-f]{7}",
        r"vit-pytorch\s\d+\.\d+",
        r"x-transformers \d+\.\d+",
    ):
        assert re.search(other, about), other
