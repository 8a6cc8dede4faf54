"""The command of a comparison's best arm, read back by the command line: it describes the run of that arm."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fathoms.cli import train as train_cli
from fathoms.cli.flags.parse import parse
from fathoms.comparing.folder import shared_settings
from fathoms.report.arm_views import arms_of
from fathoms.report.comparison_page import train_command
from fathoms.report.records import read_comparison

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ("--axis", "norm=layernorm,dyt", "--epochs", "4"),
    ("--axis", "norm=layernorm,dyt", "--recipe", "cifar", "--depth", "8", "--no-qkv-bias", "--aa", "none"),
    ("--axis", "opt=adamw,sgd,muon", "--recipe", "cifar", "--precision", "bf16", "--clip-grad", "none"),
    ("--axis", "precision=fp32,bf16", "--recipe", "cifar"),
    ("--axis", "warmup_epochs=0,2", "--recipe", "learnable_scaler_300"),
    ("--axis", "model=vit_tiny_patch16_224,cait_xxs24_224", "--mlp-ratio", "3", "--val-share", "0.2"),
    # The second arm has the learning rate of all, which the first does not share.
    ("--arm", "a: lr=1e-3,depth=2", "--arm", "b: norm=dyt", "--lr", "5e-4", "--opt-betas", "0.9", "0.95"),
    ("--preset", "scaler", "--swap-norms", "dyt", "--guard", "skip"),
    ("--model", "timm/vit_tiny_patch16_224", "--axis", "lr=1e-3,2e-3", "--amp"),
    ("--plan", str(ROOT / "plans" / "norms_depth12.toml")),
]


def settings(job):
    return json.loads(json.dumps(shared_settings([job])))


def planned(comparison, plan):
    """The comparison as its page reads it, before any run."""
    folder = comparison.folder.path
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "results.json").write_text('{"version": 1, "cells": [], "arms": []}')
    return read_comparison(folder)


def read_back(command):
    """The settings of the run that a command of `fathoms train` describes."""
    words = shlex.split(command)
    assert words[:2] == ["fathoms", "train"], command
    return settings(train_cli.make_job(parse(train_cli, "train", words[2:])))


@pytest.mark.parametrize(
    ("data", "words"),
    [*(("images", words) for words in COMMANDS), *(("digits", words) for words in COMMANDS[:3])],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_command_of_an_arm_describes_its_run(comparisons, tiny_images, words, data):
    place = [] if data == "digits" else [str(tiny_images)]
    comparison = comparisons.make(*place, *words, beside=False)
    found = planned(comparison, comparison.plan())
    for arm in arms_of(found):
        assert read_back(train_command(arm, found)) == settings(comparison.arms[arm.name][1])


def test_a_plan_that_flags_cannot_describe_has_no_command(comparisons):
    comparison = comparisons.make("--axis", "norm=layernorm,dyt", beside=False)
    plan = comparison.plan()
    found = planned(comparison, {**plan, "base": {**plan["base"], "model": "of_another_release"}})
    assert [train_command(arm, found) for arm in arms_of(found)] == ["", ""]
