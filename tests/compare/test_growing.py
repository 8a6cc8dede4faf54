"""Comparisons that are continued: more seeds, arms and values, moved data, a copied folder, tuning."""

import itertools
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import fathoms
from fathoms.cli.flags.parse import parse
from fathoms.compare import tuning
from fathoms.compare.cells import key_of
from fathoms.compare.workers.worker import make_trainer
from fathoms.data.sources.fingerprint import earlier_fingerprint
from fathoms.data.sources.splits import open_roles
from tiny_runs import stop_after_update

IMAGES = ("--recipe", "digits", "--image-size", "16", "--patch-size", "4", "--batch-size", "32")


def finished(comparisons, name="c"):
    """When each run's summary was written."""
    files = comparisons.folder(name).glob("cells/*/summary.json")
    return {file.parent.name: file.stat().st_mtime_ns for file in files}


@pytest.mark.slow
def test_a_plan_that_grows_runs_only_what_is_new_and_says_so(comparisons, capsys):
    words = ("--jobs", "2", "--keep", "none")
    assert comparisons.run("--axis", "norm=layernorm", "--seeds", "1", *words) == 0
    first = finished(comparisons)
    assert comparisons.run("--axis", "norm=layernorm,dyt", "--seeds", "2", *words) == 0
    second = finished(comparisons)
    assert len(second) == 4
    assert first.items() <= second.items()
    # An arm alone: those of earlier commands and their seeds stay in the results.
    assert comparisons.run("--axis", "norm=derf", "--seeds", "1", *words) == 0
    third = finished(comparisons)
    assert len(third) == 6
    assert second.items() <= third.items()
    rows = comparisons.rows()
    assert [(row["name"], row["seed"]) for row in rows] == [
        (f"norm={norm}", seed) for norm in ("layernorm", "dyt", "derf") for seed in (0, 1)
    ]
    assert all(row["status"] in ("done", "stalled") for row in rows)
    grown = comparisons.read("plan.json")["grown"]
    assert [(step["arms"], step["seeds"]) for step in grown] == [(["norm=dyt"], 2), (["norm=derf"], 2)]
    assert "the plan grew" in capsys.readouterr().out
    # Taken to another place, without a checkpoint, nothing is run again and nothing is refused.
    shutil.copytree(comparisons.folder(), comparisons.folder("copy"))
    assert not list(comparisons.folder("copy").glob("cells/*/checkpoints/*"))
    shutil.rmtree(comparisons.folder("copy") / "logs")
    assert comparisons.run("--axis", "norm=layernorm,dyt,derf", "--seeds", "2", *words, name="copy") == 0
    assert finished(comparisons, "copy").keys() == third.keys()
    assert not list(comparisons.folder("copy").glob("logs/*"))
    assert comparisons.read("results.json", "copy") == comparisons.read("results.json")
    assert "6 of 6 runs are there already" in capsys.readouterr().out
    # Another comparison in this folder is refused by the flag that differs.
    assert comparisons.run("--axis", "norm=layernorm", "--lr", "0.01", *words) == 2
    assert "holds another comparison (--lr" in capsys.readouterr().err
    loaded = fathoms.load_results(comparisons.folder())
    assert [(row["arm_name"], row["norm"], row["seed"]) for row in loaded][-1] == ("norm=derf", "derf", 1)


def test_a_cut_run_resumes_where_its_data_have_moved_to(comparisons, tiny_images, tmp_path):
    words = (*IMAGES, "--axis", "norm=layernorm,dyt", "--seeds", "1")
    for name in ("whole", "cut"):
        comparisons.data = tiny_images
        if name == "cut":
            trainer = make_trainer(comparisons.make(*words, name=name).cells()[0].job)
            stop_after_update(trainer, 5)
            assert trainer.run().summary["status"] == "interrupted"
            moved = tmp_path / "elsewhere.npz"
            shutil.copyfile(tiny_images, moved)
            comparisons.data = moved
        assert comparisons.run(*words, name=name) == 0
    whole, cut = ((comparisons.folder(name) / "results.json").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    assert "elsewhere" in comparisons.read("plan.json", "cut")["data"]
    # It did resume: the checkpoint's path was accepted by name for this run only.
    configs = [file.read_text() for file in sorted(comparisons.folder("cut").glob("cells/*/config.toml"))]
    assert sum('allow_change = ["data"]' in config for config in configs) == 1


def test_a_run_on_other_data_is_another_run(comparisons, tiny_images, tmp_path):
    """The same path with other images: nothing of the old comparison is taken over."""
    comparisons.data = tiny_images
    words = (*IMAGES, "--axis", "norm=layernorm,dyt", "--seeds", "1")
    before = comparisons.make(*words).cells()[0].folder
    arrays = dict(np.load(tiny_images))
    arrays["x_train"] = arrays["x_train"][::-1].copy()
    comparisons.data = tmp_path / "images.npz"
    np.savez(comparisons.data, **arrays)
    assert comparisons.make(*words).cells()[0].folder.name != before.name


def test_a_comparison_that_began_with_an_earlier_kind_of_fingerprint_goes_on_with_it(comparisons, tmp_path):
    rng = np.random.default_rng(0)
    for split, label, number in itertools.product(("train", "val"), ("a", "b"), range(4)):
        (tmp_path / "photos" / split / label).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / split / label / f"{number}.png")
    comparisons.data = tmp_path / "photos"
    words = (*IMAGES, "--axis", "norm=layernorm,dyt", "--seeds", "1", "--epochs", "1", "--jobs", "1")
    now = comparisons.make(*words)
    roles = open_roles(str(comparisons.data), now.cells()[0].job.recipe.val_share)
    stored = "".join(earlier_fingerprint(split) for split in roles[:3] if split is not None)
    assert stored != now.settings.fingerprint
    before = now.plan()
    keys = {name: key_of(job, stored) for name, (_, job) in now.arms.items()}
    now.folder.path.mkdir(parents=True)
    plan = {**before, "fingerprint": stored, "keys": keys, "grown": []}
    (now.folder.path / "plan.json").write_text(json.dumps(plan))
    assert comparisons.make(*words).settings.fingerprint == stored
    assert comparisons.run(*words) == 0
    assert len(finished(comparisons)) == 2


@pytest.mark.slow
def test_each_arm_is_tuned_on_val_with_a_seed_apart_and_its_best_value_is_used(comparisons, capsys):
    grid = ("--tune", "lr=1e-6,3e-3,1e-3", "--tune-epochs", "1")
    words = ("--axis", "norm=layernorm,dyt", "--seeds", "1", "--jobs", "2")
    assert comparisons.run(*words, *grid) == 0
    table, results = comparisons.read("tuning.json"), comparisons.read("results.json")
    assert table["split"] == "val"
    assert [len(arm["trials"]) for arm in table["arms"]] == [3, 3]
    for arm, row in zip(table["arms"], results["cells"], strict=True):
        assert {trial["seed"] for trial in arm["trials"]} == {1000}
        assert all(len(trial["curve"]) == 1 for trial in arm["trials"])
        best = max(arm["trials"], key=lambda trial: trial["top1"])["choice"]
        assert arm["best"] == best
        assert arm["edge"] == (["lr"] if best["lr"] in ("1e-6", "3e-3") else [])
        config = (comparisons.folder() / row["run"] / "config.toml").read_text()
        assert f"\nlr = {float(best['lr'])}\n" in config
        assert "\nepochs = 2\n" in config
        assert row["seed"] == 0
    assert [arm["best"] for arm in results["tuning"]] == [arm["best"] for arm in table["arms"]]
    said = capsys.readouterr().out
    assert ("at the edge of the grid" in said) == any(arm["edge"] for arm in table["arms"])
    before = (comparisons.folder() / "results.json").read_bytes()
    assert comparisons.run(*words, *grid) == 0
    assert (comparisons.folder() / "results.json").read_bytes() == before
    assert "6 of 6 runs are there already" in capsys.readouterr().out


def fake_trials(tmp_path, scores):
    """Trials of one arm whose summaries say `scores`: a number, or a status."""
    from fathoms.cli import compare as command
    from fathoms.compare.folder import ComparisonFolder

    folder = ComparisonFolder(tmp_path)
    args = parse(command, "compare", ["--device", "cpu"])
    made = tuning.Tuning(
        {"lr": [str(lr) for lr in scores]}, None, lambda _, settings: command.job_of(args, settings)
    )
    trials = made.trials({"a": {}}, "data", folder)
    for trial, score in zip(trials, scores.values(), strict=True):
        trial.cell.folder.mkdir(parents=True)
        summary = {"status": "done", "last": {"top1": score, "loss": -1.0}, "test": {"top1": 100 - score}}
        if score < 0:
            summary = {"status": "diverged", "last": {"top1": 99.0, "loss": 0.0}}
        (trial.cell.folder / "summary.json").write_text(json.dumps(summary))
    return tuning.choose(trials, folder, "top1")[0]


def test_the_best_choice_is_the_first_of_equals_and_never_a_diverged_one(tmp_path):
    found = fake_trials(tmp_path / "equal", {1e-4: 50.0, 1e-3: 70.0, 3e-3: 70.0, 1e-2: -1.0})
    assert (found["best"], found["edge"]) == ({"lr": "0.001"}, [])
    found = fake_trials(tmp_path / "edge", {1e-4: 50.0, 1e-3: 70.0, 1e-2: 80.0})
    assert (found["best"], found["edge"]) == ({"lr": "0.01"}, ["lr"])
    assert "at the edge of the grid" in tuning.tuning_lines([found])[0]
    found = fake_trials(tmp_path / "none", {1e-4: -1.0, 1e-3: -1.0})
    assert found["best"] is None
    assert "no trial has a score" in tuning.tuning_lines([found])[0]
