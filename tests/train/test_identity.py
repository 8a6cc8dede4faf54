"""The identity of a run: folders keep their names over releases, and what a device chose is not part of it."""

from __future__ import annotations

import pytest

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse
from fathoms.train.identity import POLICY, completed, config_identity, differences, recipe_identity
from fathoms.train.job import RunOptions
from fathoms.train.recipe.recipe import Recipe

FAST = "--precision bf16 --torchcompile inductor --compile-scope blocks --launch graph"


def job(*words):
    return train_command.make_job(parse(train_command, "train", list(words)))


def job_of(line):
    return job(*line.split())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "vit_digits-digits-019cf8c5"),
        ("x.npz", "vit_small_patch16_224-x.npz-618b4e05"),
        ("x.npz --recipe cifar", "vit_small_patch16_224-x.npz-90acc59a"),
        (f"x {FAST}", "vit_small_patch16_224-x-bac9cc07"),
        ("x --model timm/vit_tiny_patch16_224 --amp", "timm_vit_tiny_patch16_224-x-94b93863"),
    ],
)
def test_folders_have_the_names_of_the_first_release(words, name):
    assert job(*words.split()).folder.name == name


def test_a_newer_option_counts_only_where_it_differs_from_its_default(monkeypatch):
    monkeypatch.setattr("fathoms.train.identity._FIRST_RECIPE", frozenset(Recipe().to_dict()) - {"lr"})
    assert "lr" not in recipe_identity(Recipe())
    assert recipe_identity(Recipe(lr=0.5))["lr"] == 0.5
    old, new = ({"config": None, "recipe": recipe_identity(Recipe(lr=lr))} for lr in (1e-3, 0.5))
    assert differences(completed(old), completed(new)) == ["recipe.lr: 0.001 -> 0.5"]


def test_the_guards_policy_counts_where_it_is_read_and_not_the_default():
    defaults = RunOptions()
    assert {name: getattr(defaults, name) for name in POLICY} == POLICY
    plain = job("x").identity()
    assert not POLICY.keys() & plain.keys()
    # Without a policy that reads them they change nothing; neither does the share of bad images, which ends a run.
    assert job_of("x --guard-limit 9 --spike-score 4 --max-bad 0.5").identity() == plain
    asked = job_of("x --guard skip --guard-limit 9").identity()
    assert asked == {**plain, "guard": "skip", "guard_limit": 9}
    assert job_of("x --on-spike rollback --spike-score 4").folder != job("x").folder
    assert differences(completed(plain), completed(asked)) == ["guard: stop -> skip", "guard_limit: 5 -> 9"]


def test_auto_is_what_it_was_before_it_had_a_name():
    before = {"amp": False, "precision": None, "torchcompile": None, "compile_scope": None, "launch": None}
    assert recipe_identity(Recipe()).items() >= before.items()
    assert recipe_identity(Recipe(amp=False)) == recipe_identity(Recipe(precision="fp32"))
    assert config_identity(None) is None
