"""Commands that cannot be a comparison, beside those of tests/cli/mistakes.txt: one line, nothing written."""

import re
import shutil

import numpy as np
import pytest

from fathoms.cli import compare as command
from fathoms.cli.flags.parse import field_docs
from fathoms.cli.main import main
from fathoms.comparing.presets import PRESETS
from fathoms.comparing.results import load_results
from fathoms.errors import ConfigError
from fathoms.machine import visible_gpus
from fathoms.models.zoo import model_config
from tiny_data import MAKERS

NORMS = ("--axis", "norm=layernorm,dyt")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--arm", "a\udcff: lr=0.1", "--arm", "b: lr=0.2", "--dry-run"),
            r"--arm 'a\udcff': has control characters or bytes that are not text",
        ),
        (("--arm", "a\nb: lr=0.1", "--arm", "b: lr=0.2"), r"--arm 'a\nb': has control"),
        (("--axis", "norm=layernorm,d\x1byt"), r"--axis norm='d\x1byt': has"),
    ],
)
def test_names_of_odd_characters_are_refused_in_one_line(comparisons, capsys, words, said):
    assert comparisons.run(*words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not comparisons.root.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[axis]\nnorm = ["dyt"]', "'axes'"),
        ('[axes]\nnrom = ["dyt"]', "'norm'"),
        ('[axes]\nnorm = "dyt"', "list of values"),
        ('seeds = "five"\n[axes]\nnorm = ["dyt"]', "seeds is a whole number"),
        ('version = 9\n[axes]\nnorm = ["dyt"]', "version is 9"),
        ("seeds = ", "not readable as TOML"),
    ],
)
def test_a_plan_file_with_a_mistake_is_one_line(comparisons, capsys, tmp_path, text, said):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert comparisons.run("--plan", str(path)) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not comparisons.root.exists()


def test_a_folder_of_a_run_is_left_as_it_is(comparisons, capsys):
    comparisons.folder().mkdir(parents=True)
    (comparisons.folder() / "config.toml").write_text("")
    assert comparisons.run(*NORMS) == 2
    assert "holds a run, not a comparison" in capsys.readouterr().err
    assert [path.name for path in comparisons.folder().iterdir()] == ["config.toml"]


def test_a_folder_that_cannot_be_written_is_one_line(comparisons, capsys):
    comparisons.root.mkdir()
    comparisons.folder().write_text("a file, not a folder")
    assert comparisons.run(*NORMS) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(comparisons, capsys):
    words = ("--preset", "scaler", "--tune-epochs", "1", "--dry-run", "--no-pilot")
    assert comparisons.run(*words) == 0
    said = capsys.readouterr().out
    assert "3 arms x 5 seeds = 15 runs" in said
    assert "first 3 x 4 trials of lr" in said
    assert "smallest difference" in said
    assert not comparisons.root.exists()


def test_a_dry_run_says_which_norms_are_swapped(comparisons, capsys):
    arms = ("--arm", "a: depth=1", "--arm", "b: swap_norms=dyt")
    assert comparisons.run(*arms, "--dry-run", "--no-pilot") == 0
    assert re.search(r"arm 'b': --swap-norms dyt: \d+ norms swapped\n", capsys.readouterr().out)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_plan_that_can_be_built(comparisons, capsys, preset):
    # Those that say how they train are planned as they are, at full size.
    words = ["--preset", preset, "--dry-run", "--no-pilot"]
    if preset == "finetune":
        assert main(["compare", *words, "--output", str(comparisons.root)]) == 2
        assert "starts from trained weights; add --initial-checkpoint" in capsys.readouterr().err
        return
    if "train" in PRESETS[preset]:
        assert main(["compare", *words, "--output", str(comparisons.root)]) == 0
    else:
        assert comparisons.run(*words) == 0
    arms = PRESETS[preset].get("arms") or PRESETS[preset]["axes"]
    said = capsys.readouterr().out
    assert "5 seeds" in said
    assert str(next(iter(arms))) in said


def test_the_authors_table_is_five_pairs_of_his_models_and_says_what_he_reported(comparisons, capsys):
    words = ["--preset", "learnable_scaler", "--dry-run", "--no-pilot", "--output", str(comparisons.root)]
    assert main(["compare", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    # The digits without --epochs take those of a demonstration.
    assert "each trains 5 models, for 8 epochs in batches of 2048 at a learning rate of 0.005" in said
    assert " 16, 192, 36: 76.2 / - and 79.77 / 68.21" in said
    assert "after correction for 5 pairs" in said
    folder = said.split(" runs in ")[1].split()[0]
    # Two presets of arms went to one folder.
    main(["compare", *words[:1], "scaler", *words[2:]])
    assert folder not in capsys.readouterr().out
    scaler = model_config("vit_learnable_scaler_embed_dim192_patch16_head3_depth36")
    made = comparisons.make("--preset", "learnable_scaler", beside=False).arms
    assert made["16, 192, 36, norm=learnable_scaler"][1].config == scaler


def test_a_flag_is_the_value_of_the_arms_that_do_not_set_it_and_an_axis_replaces_that_of_a_preset(
    comparisons,
):
    arms = ("--arm", "wide: mlp_ratio=2", "--arm", "other: norm=dyt", "--norm", "rmsnorm")
    norms = [job.config.norm for _, job in comparisons.make(*arms).arms.values()]
    assert norms == ["rmsnorm", "dyt"]
    made = comparisons.make("--preset", "residual", "--axis", "depth=3")
    assert {job.config.depth for _, job in made.arms.values()} == {3}


def test_an_arm_keeps_the_first_sign_of_its_name_and_its_folders_are_not_hidden(comparisons):
    made = comparisons.make("--arm", "=x: lr=0.1", "--arm", "../../etc: lr=0.2")
    assert list(made.arms) == ["=x", "../../etc"]
    stems = {cell.folder.name.partition("-seed")[0] for cell in made.cells()}
    assert stems == {"=x", "etc"}


def test_one_arm_is_said_to_be_no_comparison(comparisons, capsys):
    assert comparisons.run("--axis", "norm=dyt", "--seeds", "1", "--dry-run", "--no-pilot") == 0
    said = capsys.readouterr().out
    assert "1 arm x 1 seed = 1 run in" in said
    assert "one arm: nothing is compared" in said
    assert "differ" not in said


def test_only_a_command_that_says_nothing_of_arms_has_three_seeds(comparisons):
    assert comparisons.make().seeds == 3
    assert comparisons.make("--axis", "norm=layernorm,dyt", name="axis").seeds == 5
    assert field_docs(command.Args)["seeds"].endswith("Default: 5; where nothing says what to compare, 3.")


def planned(comparisons, *words):
    """A folder that holds the plan of a command, and nothing else yet."""
    comparison = comparisons.make(*words)
    comparison.folder.path.mkdir(parents=True)
    comparison.folder.begin(comparison.plan())
    return comparison.folder.path / "plan.json"


def test_fewer_seeds_than_the_plan_has_take_none_away_and_that_is_said(comparisons, capsys):
    planned(comparisons, *NORMS, "--seeds", "5")
    assert comparisons.run(*NORMS, "--seeds", "3", "--dry-run", "--no-pilot") == 0
    said = capsys.readouterr().out
    assert "2 arms x 5 seeds" in said
    assert "5 seeds of each arm: --seeds 3 takes none of them away" in said


def test_a_later_command_without_seeds_keeps_those_of_the_plan(comparisons, capsys):
    planned(comparisons, *NORMS, "--seeds", "3")
    assert comparisons.run("--axis", "norm=derf", "--dry-run", "--no-pilot") == 0
    assert "3 arms x 3 seeds" in capsys.readouterr().out


def test_an_arm_that_a_later_command_leaves_out_stays_and_that_is_said(comparisons, capsys):
    planned(comparisons, *NORMS, "--seeds", "3")
    assert comparisons.run("--axis", "norm=layernorm,derf", "--dry-run", "--no-pilot") == 0
    assert "arms of earlier commands stay: 'norm=dyt'; another --experiment" in capsys.readouterr().out


def test_values_to_tune_cannot_change_once_a_run_has_ended(comparisons, capsys):
    path = planned(comparisons, *NORMS, "--tune", "lr=1e-3,2e-3")
    more = (*NORMS, "--tune", "lr=1e-3,2e-3,4e-3", "--dry-run", "--no-pilot")
    assert comparisons.run(*more) == 0
    ended = path.parent / "cells" / "norm=layernorm-seed0-0123456789"
    ended.mkdir(parents=True)
    (ended / "summary.json").write_text("{}")
    assert comparisons.run(*more) == 2
    assert "what --tune tries can no longer change; choose another --experiment" in capsys.readouterr().err


@pytest.mark.skipif(bool(visible_gpus("auto")), reason="on a GPU these can be had")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--torchcompile", "bogus"), "--torchcompile: no backend is called 'bogus'"),
        (("--device", "cuda"), "--device cuda: there is no CUDA device"),
    ],
)
def test_a_speed_or_device_that_cannot_be_had_is_refused_before_anything_is_written(
    comparisons, capsys, words, said
):
    assert comparisons.run(*NORMS, *words) == 2
    assert said in capsys.readouterr().err
    assert not comparisons.folder().exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 9}', '{"version": 1}', '{"version": 1, "base": 3}'])
def test_a_damaged_plan_is_one_line_and_stays_as_it_is(comparisons, capsys, text):
    path = planned(comparisons, *NORMS)
    path.write_text(text)
    assert comparisons.run(*NORMS) == 2
    captured = capsys.readouterr()
    assert "plan" in captured.err
    assert captured.err.count("\n") == 1
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', '{"version": 1, "cells": [3]}'])
def test_damaged_results_are_one_line(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match="results.json"):
        load_results(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no results"):
        load_results(tmp_path / "empty")
    with pytest.raises(ConfigError, match="nowhere: no such folder; give the folder of a comparison"):
        load_results(tmp_path / "nowhere")


@pytest.fixture
def three_splits(tmp_path):
    """Images of three classes, with train, val and test."""
    data = MAKERS["folder"](tmp_path / "data")
    shutil.copytree(data / "val", data / "test")
    return data


ON_IMAGES = (*NORMS, "--recipe", "digits", "--image-size", "16", "--patch-size", "8", "--in-channels", "3")


@pytest.mark.parametrize("more", [(), ("--dry-run", "--no-pilot")], ids=["run", "dry run"])
def test_data_that_every_run_would_refuse_is_refused_before_the_plan_is_written(
    comparisons, three_splits, capsys, more
):
    comparisons.data = three_splits
    assert main(["data", "check", str(three_splits), "--near", "-1"]) == 0
    extra = three_splits / "train/a/extra.png"
    shutil.copy(next((three_splits / "train/a").iterdir()), extra)
    capsys.readouterr()
    assert comparisons.run(*ON_IMAGES, *more) == 2
    assert "train/a/extra.png was added since the check" in capsys.readouterr().err
    assert not comparisons.root.exists()
    # The data mended, the same command does.
    extra.unlink()
    assert comparisons.run(*ON_IMAGES, "--dry-run", "--no-pilot") == 0


@pytest.mark.parametrize("more", [(), ("--dry-run", "--no-pilot")], ids=["run", "dry run"])
def test_splits_of_other_classes_are_refused_before_the_plan_is_written(comparisons, tmp_path, capsys, more):
    rng = np.random.default_rng(0)
    arrays = {f"x_{split}": rng.integers(0, 256, (12, 16, 16, 3), np.uint8) for split in ("train", "test")}
    np.savez(tmp_path / "odd.npz", **arrays, y_train=[0, 1, 3] * 4, y_test=[0, 1, 2] * 4)
    comparisons.data = tmp_path / "odd.npz"
    assert comparisons.run(*ON_IMAGES, *more) == 2
    assert "class '2' has no training images; fill or remove it" in capsys.readouterr().err
    assert not comparisons.root.exists()


def test_a_comparison_names_the_split_that_has_changed(comparisons, three_splits, capsys):
    comparisons.data = three_splits
    comparison = comparisons.make(*ON_IMAGES)
    with comparison.folder.locked():
        comparison.folder.begin(comparison.plan())
    path = next((three_splits / "test").rglob("*.png"))
    path.write_bytes(path.read_bytes() + b"x")
    assert comparisons.run(*ON_IMAGES) == 2
    said = capsys.readouterr().err
    old, new = re.search(
        r"holds another comparison \(other data: test (\w{12}) -> (\w{12})\);", said
    ).groups()
    assert old != new
