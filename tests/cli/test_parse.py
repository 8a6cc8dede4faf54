"""Flags of the commands: every kind of mistake gives one good line, and optional booleans have three states."""

from __future__ import annotations

import importlib

import pytest

from fathoms import FathomsError
from fathoms.cli.flags.parse import given, parse


def parsed(command, *words):
    return parse(importlib.import_module(f"fathoms.cli.{command}"), command, words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("probe --depth deep", "--depth: 'deep' is not a whole number; see --help"),
        ("probe --batch-size 1.5", "--batch-size: '1.5' is not a whole number; see --help"),
        ("probe --batch-size=x", "--batch-size: 'x' is not a whole number; see --help"),
        ("train --lr fast", "--lr: 'fast' is not a number; see --help"),
        ("train --mean 1 2", "--mean: '1 2' is not 3 numbers; see --help"),
        ("predict a.png --checkpoint x --std 1 2 z", "--std: '1 2 z' is not 3 numbers; see --help"),
        ("probe --batch-size", "--batch-size: takes a value, and none is given; see --help"),
        ("probe --depth", "--depth: takes a value, and none is given; see --help"),
        ("probe --norm dty", "--norm: no value is called 'dty'; did you mean 'dyt'?"),
        (
            "probe --attention nosuch",
            "--attention: no value is called 'nosuch'; use 'softmax' or 'talking_heads'",
        ),
        ("export run --format onx", "--format: no value is called 'onx'; did you mean 'onnx'?"),
        ("probe --nrm dyt", "no option is called '--nrm'; did you mean '--norm'?"),
        ("probe --nrm=dyt", "no option is called '--nrm'; did you mean '--norm'?"),
        ("probe -x", "no option is called '-x'; see --help"),
        ("validate --checkpont x", "no option is called '--checkpont'; did you mean '--checkpoint'?"),
        ("validate", "--checkpoint: required, and not given; see --help"),
        ("convert a.pth", "TARGET: required, and not given; see --help"),
        ("models a b", "'b' is one argument too many; see --help"),
        ("models a --json yes", "'yes' is one argument too many; see --help"),
        ("probe --json a b yes", "'yes' is one argument too many; see --help"),
    ],
)
def test_every_kind_of_mistake_gives_one_line_that_names_what_was_typed(line, message, capsys):
    with pytest.raises(FathomsError) as caught:
        parsed(*line.split())
    assert str(caught.value) == message
    assert capsys.readouterr() == ("", "")


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
    assert "--no-use-ema Take the plain weights" in text
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --learning-rate 1", "no option is called '--learning-rate'; did you mean '--lr'?"),
        ("train --epoch 1", "no option is called '--epoch'; did you mean '--epochs'?"),
        ("train --max_epochs 1", "no option is called '--max_epochs'; did you mean '--epochs'?"),
        ("train --gradient-clip-val 1", "did you mean '--clip-grad'?"),
        ("train --pretrained", "did you mean '--initial-checkpoint'?"),
        ("train --optimizer sgd", "did you mean '--opt'?"),
        ("train --output_dir x", "did you mean '--output'?"),
        ("validate --weights x", "did you mean '--checkpoint'?"),
        ("predict --input x", "give IMAGES without a flag"),
        ("compare --dataset x", "give DATA without a flag"),
        ("probe --embed-dim 8", "did you mean '--dim'?"),
        ("train --banana 3", "no option is called '--banana'; see --help"),
    ],
)
def test_the_words_of_other_libraries_are_known_and_nothing_far_fetched_is_proposed(line, message):
    with pytest.raises(FathomsError) as caught:
        parsed(*line.split())
    assert message in str(caught.value)


def test_every_word_that_is_known_means_an_option_that_exists():
    from fathoms.cli.flags.parse import names_of
    from fathoms.cli.main import COMMANDS, module_of
    from fathoms.names.foreign_names import BROUGHT

    known = {"weights"}
    for command in COMMANDS:
        flags, positionals = names_of(module_of(command).Args)
        known |= {flag[2:].replace("-", "_") for flag in flags} | set(positionals)
    assert {option for options in BROUGHT.values() for option in options} <= known


def test_the_data_may_come_under_timm_s_flag():
    assert parsed("train", "--data-dir", "photos").data == "photos"
    assert parsed("train", "--data-dir=photos").data == "photos"
