"""Flags of the commands: every kind of mistake gives one good line, and optional booleans have three states."""

from __future__ import annotations

import pytest

from fathoms.cli.flags.parse import given, parse
from fathoms.cli.main import module_of


def parsed(command, *words):
    return parse(module_of(command), command, words)


def test_an_optional_boolean_is_given_refused_or_absent():
    assert "amp" not in given(parsed("train").training)
    assert given(parsed("train", "--amp").training)["amp"] is True
    assert given(parsed("train", "--no-amp").training)["amp"] is False


def help_of(command, capsys):
    with pytest.raises(SystemExit):
        parsed(command, "--help")
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_names_values_as_people_do(capsys):
    text = help_of("validate", capsys)
    assert "[OPTIONS] [DATA]" in text
    assert "--robustness NAME [NAME ...] Further data sets to evaluate. --real-labels" in text
    assert "--use-ema {True,False} Averaged (EMA) or plain weights" in text
    assert "default: True" not in text
    assert "[STR" not in text + help_of("train", capsys)
    assert "IMAGES ... Images, or folders of images. " in help_of("predict", capsys)


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("train", "[OPTIONS] [DATA]"),
        ("compare", "[OPTIONS] [DATA]"),
        ("validate", "[OPTIONS] [DATA]"),
        ("predict", "[OPTIONS] IMAGES ..."),
        ("report", "FOLDERS ..."),
        ("models", "[PATTERN]"),
        ("export", "[OPTIONS] CHECKPOINT"),
    ],
)
def test_usage_shows_what_is_optional_and_no_empty_default(command, usage, capsys):
    with pytest.raises(SystemExit):
        parsed(command, "--help")
    text = capsys.readouterr().out
    assert usage in text
    assert "(default: )" not in text


def test_every_word_that_is_known_means_an_option_that_exists():
    from fathoms.cli.flags.parse import names_of
    from fathoms.cli.main import COMMANDS, module_of
    from fathoms.registry import BROUGHT

    known = {"weights"}
    for command in COMMANDS:
        flags, positionals = names_of(module_of(command).Args)
        known |= {flag[2:].replace("-", "_") for flag in flags} | set(positionals)
    assert {option for options in BROUGHT.values() for option in options} <= known


def test_the_data_may_come_under_timm_s_flag():
    assert parsed("train", "--data-dir", "photos").data == "photos"
    assert parsed("train", "--data-dir=photos").data == "photos"
