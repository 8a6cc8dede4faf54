"""Options that are on or off, as axes, arms, tuned values and settings of a plan file: never on where "no" is meant."""

import typing

import pytest

from fathoms.cli import compare as command
from fathoms.cli import probe, train
from fathoms.cli.compare_plan import job_of
from fathoms.cli.flags.parse import parse_settings
from fathoms.cli.flags.plan_flags import read_plan_file
from fathoms.errors import ConfigError, FathomsError
from fathoms.models.config import ViTConfig
from fathoms.training.recipe import Recipe

BOOLEANS = [
    name for kind in (Recipe, ViTConfig) for name, hint in typing.get_type_hints(kind).items() if hint is bool
]
ADVICE = {"no": "use 'False' or 'True'", "false": "did you mean 'False'?", "0": "use 'False' or 'True'"}


@pytest.mark.parametrize("name", BOOLEANS)
def test_another_spelling_is_refused_with_the_nearest_one(comparisons, tmp_path, name):
    for value, advice in ADVICE.items():
        for flag in ("--axis", "--tune"):
            others = () if flag == "--axis" else ("--axis", "norm=layernorm,dyt")
            with pytest.raises(ConfigError, match=f"^{flag} {name}={value}: no value is called '{value}'; "):
                comparisons.make(flag, f"{name}=True,{value}", *others)
        with pytest.raises(FathomsError) as caught:
            job_of(command.Args(), {name: value})
        assert advice in str(caught.value)
        (tmp_path / "plan.toml").write_text(f'[train]\n{name} = "{value}"')
        with pytest.raises(ConfigError, match=rf"\[train\] --{name.replace('_', '-')}: no value is called"):
            read_plan_file(str(tmp_path / "plan.toml"))


def test_an_arm_that_spells_a_boolean_otherwise_is_refused_with_its_name(comparisons):
    with pytest.raises(ConfigError, match="arm 'off': --qkv-bias: no value is called 'false'"):
        comparisons.make("--arm", "on: qkv_bias=True", "--arm", "off: qkv_bias=false")


@pytest.mark.parametrize("name", BOOLEANS)
def test_the_booleans_of_a_plan_file_are_what_they_say(tmp_path, name):
    for value in (True, False):
        (tmp_path / "plan.toml").write_text(f"[train]\n{name} = {str(value).lower()}")
        args = read_plan_file(str(tmp_path / "plan.toml")).train
        assert {**vars(args.training), **vars(args.switches)}[name] is value


def test_the_booleans_of_axes_and_arms_in_a_plan_file_are_what_they_say(comparisons, tmp_path):
    lines = "[axes]\nqkv_bias = [true, false]\n[arms]\non = {model_ema = true}\noff = {model_ema = false}"
    (tmp_path / "plan.toml").write_text(lines)
    made = comparisons.make("--plan", str(tmp_path / "plan.toml"))
    found = [(job.recipe.model_ema, job.config.qkv_bias) for _, job in made.arms.values()]
    assert found == [(True, True), (True, False), (False, True), (False, False)]


def test_a_value_that_would_be_read_as_an_argument_is_refused():
    with pytest.raises(ConfigError, match="'x' is the value of no option"):
        parse_settings(probe, "probe", {"full": "x"})
    with pytest.raises(FathomsError, match="no option is called '--no-amp'"):
        parse_settings(train, "train", {"no_amp": "True"})
