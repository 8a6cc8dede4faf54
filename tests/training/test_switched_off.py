"""Every option of a recipe can be brought back to its default from the command line, whatever a file says."""

from __future__ import annotations

import typing

import pytest

from fathoms import FathomsError
from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse
from fathoms.errors import flag_of
from fathoms.training.recipe import DEFAULTS, RECIPE_FIELDS, Recipe

# A value beside the default, and what it needs to be of use.
OTHER = {
    "epochs": "3",
    "batch_size": "7",
    "grad_accum_steps": "2",
    "opt": '"lamb"',
    "lr": "0.5",
    "weight_decay": "0.5",
    "opt_eps": "1e-7",
    "opt_betas": "[0.8, 0.9]",
    "momentum": '0.8\nopt = "sgd"',
    "layer_decay": "0.8",
    "clip_grad": "1.0",
    "sched": '"wsd"',
    "warmup_epochs": "3.0",
    "warmup_lr": "1e-6\nwarmup_epochs = 3.0",
    "warmup_prefix": "true\nwarmup_epochs = 3.0",
    "min_lr": "1e-6",
    "cooldown_epochs": "2.0",
    "decay_epochs": '3.0\nsched = "step"',
    "decay_rate": '0.3\nsched = "step"',
    "epoch_factor": '0.5\nsched = "custom"',
    "epoch_threshold": '0.5\nsched = "custom"',
    "sched_on_updates": "true",
    "smoothing": "0.2",
    "bce_loss": "true",
    "bce_sum": "true\nbce_loss = true",
    "bce_target_thresh": "0.2\nbce_loss = true",
    "mixup": "0.8",
    "cutmix": "1.0",
    "mixup_prob": "0.5\nmixup = 0.8",
    "mixup_switch_prob": "0.3\nmixup = 0.8\ncutmix = 1.0",
    "mixup_mode": '"elem"\nmixup = 0.8',
    "aa": '"rand-m9"',
    "color_jitter": "0.3",
    "reprob": "0.25",
    "remode": '"const"\nreprob = 0.25',
    "recount": "2\nreprob = 0.25",
    "aug_repeats": "3",
    "crop": '"whole"',
    "crop_padding": '2\ncrop = "pad"',
    "scale": "[0.5, 1.0]",
    "ratio": "[0.9, 1.1]",
    "val_share": "0.2",
    "progressive_size": '"0:4,2:8"',
    "hflip": "0.0",
    "train_interpolation": '"bicubic"',
    "interpolation": '"bilinear"',
    "crop_pct": "0.8",
    "mean": "[0.1, 0.1, 0.1]",
    "std": "[0.1, 0.1, 0.1]",
    "train_feature_decay": "0.1",
    "attn_extra_loss": "0.1\nattn_extra_loss_layers = 2",
    "attn_extra_loss_layers": "2\nattn_extra_loss = 0.1",
    "teacher": '"timm/x"\ndistillation_type = "hard"',
    "distillation_type": '"hard"\nteacher = "timm/x"',
    "distillation_alpha": '0.1\nteacher = "timm/x"\ndistillation_type = "soft"',
    "distillation_tau": '3.0\nteacher = "timm/x"\ndistillation_type = "soft"',
    "model_ema": "true",
    "model_ema_decay": "0.9\nmodel_ema = true",
    "model_ema_warmup": "true\nmodel_ema = true",
    "amp": "true",
    "amp_dtype": '"float16"\namp = true',
    "precision": '"autocast"',
    "torchcompile": '"inductor"',
    "grad_checkpointing": "true",
    "freeze": '"stem*"',
}
# Options that go together must go together.
WITH = {"teacher": ["--distillation-type", "none"], "distillation_type": ["--teacher", "none"]}
# No block is no value of its own: the penalty is switched off, and its layers with it.
INSTEAD = {"attn_extra_loss_layers": ["--attn-extra-loss", "0"]}


def default_words(name):
    """The flag that brings an option back to its default."""
    value = DEFAULTS[name]
    if name in INSTEAD:
        return INSTEAD[name]
    if isinstance(value, bool) or name == "amp":
        return [f"--no-{flag_of(name)[2:]}"]
    words = ["none"] if value is None else [str(v) for v in (value if isinstance(value, tuple) else (value,))]
    return [flag_of(name), *words]


def recipe_of(*words):
    return train_command.make_job(parse(train_command, "train", words)).recipe


@pytest.mark.parametrize("name", RECIPE_FIELDS)
def test_a_flag_brings_an_option_of_a_file_back_to_its_default(name, tmp_path):
    file = tmp_path / "r.toml"
    file.write_text(f"{name} = {OTHER[name]}\n")
    words = ["data", "--recipe", str(file), "--model", "vit_digits"]
    before = recipe_of(*words)
    assert getattr(before, name) != DEFAULTS[name]
    after = recipe_of(*words, *default_words(name), *WITH.get(name, []))
    # Mixed precision that is not asked for is the device's choice; switched off, it is off.
    default = getattr(recipe_of("data", "--model", "vit_digits"), name)
    assert getattr(after, name) == (False if name == "amp" else default)


@pytest.mark.parametrize("word", ["none", "None", "off"])
@pytest.mark.parametrize("form", ["--aa {}", "--aa={}"])
def test_a_policy_is_switched_off_in_every_spelling(word, form, tmp_path):
    (tmp_path / "r.toml").write_text('aa = "rand-m9"\nclip_grad = 1.0\n')
    recipe = recipe_of("--recipe", str(tmp_path / "r.toml"), *form.format(word).split(), "--clip-grad", word)
    assert (recipe.aa, recipe.clip_grad) == (None, None)


def test_a_file_switches_off_too(tmp_path):
    (tmp_path / "r.toml").write_text('aa = "none"\nclip_grad = "none"\n')
    assert recipe_of("--recipe", str(tmp_path / "r.toml")).aa is None
    (tmp_path / "r.toml").write_text('lr = "none"\n')
    with pytest.raises(FathomsError, match="--lr='none' is not a number"):
        recipe_of("--recipe", str(tmp_path / "r.toml"))


def test_none_stays_the_name_of_a_part():
    job = train_command.make_job(
        parse(train_command, "train", ["--final-norm", "none", "--residual-init", "none"])
    )
    assert (job.config.final_norm, job.config.residual_init) == ("none", None)


def test_an_axis_of_a_comparison_has_an_off_value():
    from fathoms.cli import compare, compare_plan

    args = parse(compare, "compare", ["--axis", "clip_grad=none,1", "--clip-grad", "3"])
    assert compare_plan.job_of(args, {"clip_grad": "none"}).recipe.clip_grad is None
    assert compare_plan.job_of(args, {"clip_grad": "1"}).recipe.clip_grad == 1.0
    assert compare_plan.job_of(args, {}).recipe.clip_grad == 3.0


def test_every_option_that_may_be_none_takes_the_word():
    hints = typing.get_type_hints(Recipe)
    may_be_none = {name for name, hint in hints.items() if type(None) in typing.get_args(hint)}
    assert Recipe.can_be_off() == may_be_none - {"amp"}
    assert may_be_none == {name for name in RECIPE_FIELDS if DEFAULTS[name] is None}
