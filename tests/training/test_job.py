"""A job: what it writes down comes back from --config, and every setting that decides the result is its identity."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from fathoms import FathomsError
from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse
from fathoms.cli.main import main
from fathoms.training.job import OF_RESULT, Job, RunOptions, differences
from fathoms.training.recipe import recipe_names
from fathoms.training.run_folder import to_toml


def job_of(*words):
    return train_command.make_job(parse(train_command, "train", [*words]))


def written(tmp_path, job):
    (tmp_path / "config.toml").write_text(to_toml(job.table()))
    return str(tmp_path / "config.toml")


@pytest.mark.parametrize(
    "words",
    [
        [],
        *(["photos", "--recipe", name, "--initial-checkpoint", "w.safetensors"] for name in recipe_names()),
        ["photos", "--model", "timm/vit_tiny_patch16_224", "--epochs", "3"],
        ["--recipe", "vit5", "--aa", "none", "--seed", "3", "--norm", "dyt", "--swap-norms", "rmsnorm"],
        ["--progressive-size", "0:4,5:8", "--clip-grad", "1", "--output", "elsewhere", "--guard", "skip"],
    ],
    ids=" ".join,
)
def test_a_written_job_comes_back(tmp_path, words):
    job = job_of(*words)
    assert job_of("--config", written(tmp_path, job)) == job


def test_another_method_leaves_the_options_of_the_recipes_own_behind(tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text("""[model]\nname = "vit_digits"\nresidual = "layerscale"\nresidual_init = 0.3\n""")
    kept = job_of("--recipe", str(recipe), "--residual", "layerscale").config
    left = job_of("--recipe", str(recipe), "--residual", "rezero").config
    assert (kept.residual_init, left.residual_init) == (0.3, None)
    assert (job_of().config.stem_init, job_of("--stem", "conv").config.stem) == ("trunc_normal", "conv")


def test_flags_override_the_file_also_with_the_value_of_their_default(tmp_path):
    file = written(tmp_path, job_of("--seed", "7", "--opt", "lamb", "--lr", "0.01", "--depth", "3"))
    job = job_of("--config", file, "--seed", "42", "--opt", "adamw", "--depth", "2", "--output", "o")
    assert (job.run.seed, job.recipe.opt, job.recipe.lr, job.config.depth) == (42, "adamw", 0.01, 2)
    assert job.run.output == "o"


@pytest.mark.parametrize(("typed", "data"), [((), "photos"), (("digits",), None), (("other",), "other")])
def test_data_override_the_file_also_by_the_name_of_the_digits(tmp_path, typed, data):
    file = written(tmp_path, job_of("photos"))
    assert job_of(*typed, "--config", file).data == data


def test_a_dry_run_trains_nothing_and_prints_a_file_that_trains_the_same(digit_runs, tmp_path, capsys):
    words = digit_runs.words("--epochs", "1", name="a")
    assert main(["train", *words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert not digit_runs.folder("a").exists()
    assert "# model: vit_digits, " in printed
    assert "# splits: " in printed
    (tmp_path / "a.toml").write_text(printed)
    assert main(["train", "--config", str(tmp_path / "a.toml"), "--experiment", "b"]) == 0
    assert main(["train", *words]) == 0
    assert digit_runs.same("a", "b")
    # What a run adds to its own file is no setting.
    again = job_of("--config", str(digit_runs.folder("a") / "config.toml"))
    assert again.identity() == job_of(*words).identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 3}, "no key is called 'lr'"),
        ({"recipe": {"lrr": 0.1}}, "no option is called 'lrr'; did you mean 'lr'?"),
        ({"recipe": 3}, r"write \[recipe\]"),
        ({"run": {"workers": "x"}}, r"\[run\]\.workers='x' is not a whole number"),
        ({"run": {"seed": 1}, "seed": 2}, r"seed is 2 at the top and 1 under \[run\]"),
        ({"model": {"depth": 3}}, r"name under \[model\] must be strings"),
        ({"model": {"name": "timm/x", "depth": 3}}, "depth: timm models have no switches"),
    ],
    ids=str,
)
def test_a_mistake_in_the_file_is_named(change, message):
    table = {"data": "digits", "model": {"name": "vit_digits"}, **change}
    with pytest.raises(FathomsError, match=message):
        Job.from_table(tomllib.loads(to_toml(table)), "c.toml")


@pytest.mark.parametrize("words", [["--model", "vit_digits"], ["--recipe", "digits"]], ids=" ".join)
def test_a_second_source_of_the_settings_is_refused(tmp_path, words):
    with pytest.raises(FathomsError, match="--config names the model"):
        job_of("--config", written(tmp_path, job_of()), *words)


def test_every_setting_is_in_the_identity_but_those_of_how_a_run_is_kept():
    plain = job_of("x.npz")
    identity = plain.identity()
    assert identity["recipe"] == plain.recipe.to_dict()
    assert identity["config"] == plain.config.to_dict()
    kept = {each.name for each in dataclasses.fields(RunOptions)} - identity.keys()
    assert kept == {
        *(
            "output",
            "experiment",
            "device",
            "workers",
            "worker_kind",
            "max_bad",
            "resume",
            "allow_change",
            "fsdp",
        ),
        *("recovery_interval", "checkpoint_hist", "eval_interval", "probe_interval", "log"),
    }
    assert set(OF_RESULT) < identity.keys()


@pytest.mark.parametrize("flag", ["--lr 0.5", "--depth 3", "--seed 7", "--guard skip", "--precision fp32"])
def test_another_setting_is_another_folder_and_is_named(flag):
    before, now = job_of("x.npz"), job_of("x.npz", *flag.split())
    assert before.folder != now.folder == job_of("x.npz", *flag.split()).folder
    named = [
        change.partition(":")[0].rpartition(".")[2]
        for change in differences(before.identity(), now.identity())
    ]
    # Precision is compared with what a device made of it.
    assert named == ([] if "precision" in flag else [flag.split()[0].removeprefix("--")])


def test_an_identity_is_a_copy():
    one = job_of("x.npz")
    one.identity()["recipe"]["lr"] = 7.0
    assert one.identity()["recipe"]["lr"] == one.recipe.lr
