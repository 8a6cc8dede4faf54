"""Recipes match the papers they are named after, and an option that would not be used is refused."""

from __future__ import annotations

import shlex

import pytest

from fathoms import FathomsError
from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse
from fathoms.cli.main import main
from fathoms.training.recipe import (
    DEFAULTS,
    RECIPE_FIELDS,
    USES,
    Recipe,
    read_recipe,
    recipe_names,
    recipe_options,
    refuse_unused,
    unused,
)

HARD = {"teacher": "timm/regnety_160", "distillation_type": "hard"}
SOFT = HARD | {"distillation_type": "soft"}

# An option, a value for it, and options under which it is read.
NEEDS = {
    "momentum": (0.8, {"opt": "sgd"}),
    "warmup_lr": (1e-6, {"warmup_epochs": 2.0}),
    "warmup_prefix": (True, {"warmup_epochs": 2.0}),
    "decay_epochs": (3.0, {"sched": "step"}),
    "decay_rate": (0.5, {"sched": "step"}),
    "epoch_factor": (0.8, {"sched": "custom"}),
    "epoch_threshold": (0.5, {"sched": "custom"}),
    "bce_sum": (True, {"bce_loss": True}),
    "bce_target_thresh": (0.2, {"bce_loss": True}),
    "mixup_prob": (0.5, {"mixup": 0.1}),
    "mixup_mode": ("pair", {"cutmix": 1.0}),
    "mixup_switch_prob": (0.3, {"mixup": 0.1, "cutmix": 1.0}),
    "remode": ("const", {"reprob": 0.25}),
    "recount": (2, {"reprob": 0.25}),
    "crop_padding": (2, {"crop": "pad"}),
    "attn_extra_loss_layers": (6, {"attn_extra_loss": 0.03}),
    "distillation_alpha": (0.3, HARD),
    "distillation_tau": (3.0, SOFT),
    "model_ema_decay": (0.9, {"model_ema": True}),
    "model_ema_warmup": (True, {"model_ema": True}),
    "amp_dtype": ("float16", {"amp": True}),
}
# An option that is read by default, and what switches it off.
SWITCHED_OFF = {
    "opt_eps": (1e-6, {"opt": "sgd"}),
    "opt_betas": ((0.9, 0.95), {"opt": "momentum"}),
    "min_lr": (1e-5, {"sched": "constant"}),
    "cooldown_epochs": (2.0, {"sched": "step"}),
    "sched_on_updates": (True, {"sched": "constant"}),
    "scale": ((0.5, 1.0), {"crop": "whole"}),
    "ratio": ((0.9, 1.1), {"crop": "pad"}),
}


def job(*words):
    return train_command.make_job(parse(train_command, "train", ["somewhere", *words]))


def flag(name):
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("name", NEEDS)
def test_an_option_is_refused_without_what_it_needs_and_taken_with_it(name):
    value, needs = NEEDS[name]
    with pytest.raises(
        FathomsError, match=rf"{flag(name)} would not be used: it needs .*; add that or leave"
    ):
        Recipe.join({}, {name: value})
    assert getattr(Recipe.join(needs, {name: value}), name) == value


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_an_option_is_refused_where_another_switches_it_off(name):
    value, off = SWITCHED_OFF[name]
    assert getattr(Recipe.join({}, {name: value}), name) == value
    with pytest.raises(FathomsError, match=f"{flag(name)} would not be used"):
        Recipe.join(off, {name: value})


def test_two_conditions_of_one_option_are_both_held_to():
    with pytest.raises(FathomsError, match="needs both --mixup and --cutmix"):
        Recipe.join({"cutmix": 1.0}, {"mixup_switch_prob": 0.3})
    with pytest.raises(FathomsError, match="needs --distillation-type soft"):
        Recipe.join(HARD, {"distillation_tau": 2.0})


def test_every_row_of_the_table_is_tested_and_names_fields():
    rows = {name for use in USES for name in use.names}
    assert rows <= set(RECIPE_FIELDS)
    # --amp has words of its own, in test_policy.py.
    assert rows == {*NEEDS, *SWITCHED_OFF, "amp"}


def test_a_flag_at_its_default_is_refused_too():
    """0.9998 would change nothing, but whoever writes it believes that there is an average."""
    with pytest.raises(FathomsError, match="--model-ema-decay would not be used"):
        job("--model-ema-decay", "0.9998")


def test_flags_may_switch_off_what_a_recipe_has_without_naming_its_options():
    recipe = job("--recipe", "cait_400", "--no-model-ema", "--reprob", "0").recipe
    assert (recipe.model_ema, recipe.model_ema_decay) == (False, DEFAULTS["model_ema_decay"])
    recipe = job("--recipe", "learnable_scaler_300", "--sched", "cosine").recipe
    assert (recipe.sched, recipe.epoch_factor) == ("cosine", None)


def test_recipes_in_python_are_held_to_the_same_table():
    with pytest.raises(FathomsError, match="--momentum would not be used: it needs --opt sgd"):
        Recipe(momentum=0.8)
    refuse_unused(Recipe(), RECIPE_FIELDS[:3])
    assert "momentum" in unused(Recipe())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 'fast'", "--lr='fast' is not a number"),
        ("epochs = 1.5", "--epochs=1.5 is not a whole number"),
        ("epochs = true", "--epochs=True is not a whole number"),
        ("mean = [0.5, 0.5]", "is not a list of 3 values"),
        ("model = 'cait_s24_224'", "model must be a table"),
        ("learning_rate = 1", "no option is called 'learning_rate'"),
        ("[model]\ndeep = 3", "no option is called 'deep'; did you mean 'depth'?"),
        ("momentum = 0.9", "--momentum would not be used"),
        ("lr = ", "not readable as TOML"),
    ],
)
def test_a_recipe_file_with_a_mistake_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(FathomsError) as refusal:
        read_recipe(str(path))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_command_refuses_such_a_file_before_anything_is_written(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("lr = 'fast'")
    assert main(["train", "--recipe", str(tmp_path / "mine.toml"), "--output", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_every_recipe_can_be_carried_out():
    for name in recipe_names():
        table = read_recipe(name)
        assert Recipe.join(recipe_options(table, name), {}).epochs == table["epochs"]


# The training commands of the authors, with a value after every flag.
LINES = {
    # facebookresearch/deit, README_revenge.md; --batch 256 on 8 GPUs; --eval-crop-ratio is crop-pct here.
    "deit3_800": "--batch 256 --lr 4e-3 --epochs 800 --weight-decay 0.05 --sched cosine --input-size 224 "
    "--crop-pct 1.0 --reprob 0.0 --gpu 8 --smoothing 0.0 --warmup-epochs 5 --opt lamb --warmup-lr 1e-6 --mixup .8 "
    "--drop-path 0.05 --cutmix 1.0 --repeated-aug 3 --bce-loss True --color-jitter 0.3 --ThreeAugment 3a",
    # wangf3014/ViT-5, README.md; --batch 256 on 8 GPUs.
    "vit5": "--gpu 8 --input-size 224 --batch 256 --lr 4e-3 --weight-decay 0.05 --warmup-epochs 5 --crop-pct 1.0 "
    "--reprob 0.0 --smoothing 0.0 --epochs 800 --opt lamb --mixup .8 --cutmix 1.0 --repeated-aug 3 --bce-loss True "
    "--color-jitter 0.3 --ThreeAugment 3a --drop-path 0.05",
    # LearnableScaler's README, without --torchcompile, which every recipe leaves open: minutes for each model on a CPU.
    "learnable_scaler_300": "--weight-decay 0.02 --opt lamb --aa rand-m7-mstd0.5 --warmup-epochs 0 --epochs 300 "
    "--sched custom --mixup 0.1 --cutmix 1 --batch 256 --gpu 1 --clip-grad 14 --grad-accum-steps 8 --lr 0.005 "
    "--amp True --amp-dtype bfloat16 --torchcompile auto --epoch-factor 0.8 --epoch-threshold 0.5 "
    "--train-feature-decay 0.1 --attn-extra-loss 0.03 --attn-extra-loss-layers 6",
}
NAMES = {"repeated_aug": "aug_repeats", "ThreeAugment": "aa"}


@pytest.mark.parametrize("name", LINES)
def test_a_recipe_says_what_its_authors_line_says(name):
    words = shlex.split(LINES[name])
    line = {
        key.removeprefix("--").replace("-", "_"): value
        for key, value in zip(words[::2], words[1::2], strict=True)
    }
    made = job("--recipe", name)
    assert made.config is not None
    assert made.config.image_size == int(line.pop("input_size", "224"))
    assert made.config.drop_path == float(line.pop("drop_path", "0"))
    assert made.recipe.batch_size == int(line.pop("batch")) * int(line.pop("gpu"))
    for key, value in line.items():
        own = getattr(made.recipe, NAMES.get(key, key))
        assert own == (type(own)(value) if not isinstance(own, str) else value), key


def test_options_from_toml_are_of_their_fields_types():
    options = recipe_options({"mean": [0.1, 0.5, 0.9], "epochs": 2, "model": {}, "about": "x"}, "here")
    assert options == {"mean": (0.1, 0.5, 0.9), "epochs": 2}
    with pytest.raises(FathomsError, match="here: no option is called 'epoch'; did you mean 'epochs'?"):
        recipe_options({"epoch": 2}, "here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoothing": 1.0}, "--smoothing 1.*: use a number below 1"),
        ({"smoothing": -0.1}, "--smoothing -0.1: use 0 or more"),
        ({"bce_loss": True, "bce_target_thresh": 1.5}, "--bce-target-thresh 1.5: use"),
        ({**HARD, "distillation_alpha": 1.5}, "--distillation-alpha 1.5: use 1 or less"),
        ({**SOFT, "distillation_tau": 0.0}, "--distillation-tau 0.*: use a number above 0"),
        ({"model_ema": True, "model_ema_decay": 1.5}, "--model-ema-decay 1.5: use 1 or less"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_number_out_of_range_is_refused_before_anything_is_opened(options, message):
    with pytest.raises(FathomsError, match=message):
        Recipe(**options)
