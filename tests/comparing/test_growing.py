"""Comparisons that are continued: more seeds, arms and values, moved data, a copied folder, tuning."""

import json
import shutil

import numpy as np
import pytest

import fathoms
from fathoms.cli.flags.parse import parse
from fathoms.comparing import tuning
from fathoms.comparing.worker import make_trainer
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


@pytest.mark.slow
def test_each_arm_is_tuned_on_val_with_a_seed_apart_and_its_best_value_is_used(comparisons, capsys):
    grid = ("--tune", "lr=2e-3,8e-3,4e-3", "--tune-epochs", "6")
    words = ("--axis", "norm=layernorm,rmsnorm", "--seeds", "1", "--jobs", "2")
    learning = ("--epochs", "7", "--dim", "32", "--batch-size", "32", "--stem-init", "fan_in")
    assert comparisons.run(*words, *grid, *learning) == 0
    table, results = comparisons.read("tuning.json"), comparisons.read("results.json")
    assert table["split"] == "val"
    for arm, row in zip(table["arms"], results["cells"], strict=True):
        # The best trial lies on the edge of the grid, which is extended by one step.
        assert [trial["choice"]["lr"] for trial in arm["trials"]] == ["2e-3", "8e-3", "4e-3", "0.016"]
        assert {trial["seed"] for trial in arm["trials"]} == {1000}
        assert all(len(trial["curve"]) == 6 for trial in arm["trials"])
        scores = {float(trial["choice"]["lr"]): trial["top1"] for trial in arm["trials"]}
        assert max(scores, key=scores.__getitem__) == 8e-3
        a, b, _ = np.polyfit(np.log2(list(scores)), list(scores.values()), 2)
        assert float(arm["best"]["lr"]) == pytest.approx(2 ** (-b / (2 * a)), rel=1e-2)
        assert (arm["rule"], arm["edge"], arm["replaced"], arm["failed"]) == ("parabola", [], [], [])
        assert arm["luck"]["variance"] > 0
        config = (comparisons.folder() / row["run"] / "config.toml").read_text()
        assert f"\nlr = {float(arm['best']['lr'])}\n" in config
        assert "\nepochs = 7\n" in config
        assert (row["seed"], row["status"]) == (0, "done")
    assert [arm["best"] for arm in results["tuning"]] == [arm["best"] for arm in table["arms"]]
    said = capsys.readouterr().out
    assert said.count("the top of a parabola through 4 trials") == 2
    assert "at the edge of" not in said
    before = (comparisons.folder() / "results.json").read_bytes()
    assert comparisons.run(*words, *grid, *learning) == 0
    assert (comparisons.folder() / "results.json").read_bytes() == before
    said = capsys.readouterr().out
    assert "8 of 8 runs are there already" in said
    assert "2 of 2 runs are there already" in said


def fake_trials(tmp_path, scores):
    """Trials of one arm whose summaries say `scores`: a number, or a status."""
    from fathoms.cli import compare as command
    from fathoms.cli import compare_plan
    from fathoms.comparing.folder import ComparisonFolder

    folder = ComparisonFolder(tmp_path)
    args = parse(command, "compare", ["--device", "cpu"])
    grid = {"lr": [str(lr) for lr in scores]}
    made = tuning.Tuning(grid, None, lambda _, settings: compare_plan.job_of(args, settings), images=1000)
    trials = made.trials({"a": {}}, "data", folder)
    for trial, score in zip(trials, scores.values(), strict=True):
        trial.cell.folder.mkdir(parents=True)
        summary = {
            "status": "done",
            "last": {"top1": score, "loss": -1.0},
            "test": {"top1": 100 - score, "loss": 1.0},
        }
        if score < 0:
            summary = {"status": "diverged", "last": {"top1": 99.0, "loss": 0.0}}
        (trial.cell.folder / "summary.json").write_text(json.dumps(summary))
    return made.choose(trials, folder)[0]


def test_a_rate_is_the_top_of_a_parabola_and_never_one_that_diverged(tmp_path):
    found = fake_trials(tmp_path / "top", {1e-3: 60.0, 2e-3: 69.0, 4e-3: 70.0, 8e-3: 63.0, 1.6e-2: -1.0})
    assert (found["rule"], found["edge"], found["replaced"]) == ("parabola", [], [])
    assert 2e-3 < float(found["best"]["lr"]) < 4e-3
    assert found["luck"]["variance"] > 0
    said = tuning.tuning_lines([found])[0]
    assert "the top of a parabola through 4 trials, known to a factor of" in said
    found = fake_trials(tmp_path / "edge", {1e-4: 50.0, 1e-3: 70.0, 1e-2: 80.0})
    assert found["edge"] == ["lr"]
    assert "at the edge of what was tried" in tuning.tuning_lines([found])[0]
    found = fake_trials(tmp_path / "none", {1e-4: -1.0, 1e-3: -1.0, 1e-2: -1.0})
    assert found["best"] is None
    assert "no trial has a score" in tuning.tuning_lines([found])[0]
    # Two values have no parabola: the best trial, of equal ones the first.
    found = fake_trials(tmp_path / "two", {1e-4: 70.0, 1e-3: 70.0})
    assert (found["best"], found["rule"], found["luck"]) == ({"lr": "0.0001"}, "best", None)
    # A curve that falls from the first value on has its top there; one trial between two that diverged is no edge.
    falling = tuning.top_of({1e-3: 80.0, 2e-3: 72.0, 4e-3: 60.0}, 0.1)
    assert (falling.value, falling.rule, falling.edge) == (1e-3, "parabola", True)
    alone = tuning.top_of({1e-3: None, 2e-3: 60.0, 4e-3: None}, 2.0)
    assert (alone.value, alone.rule, alone.lost, alone.variance, alone.edge) == (
        2e-3,
        "best",
        2.0,
        4.0,
        False,
    )


def test_a_value_is_at_the_edge_only_where_it_is_the_first_or_the_last_that_was_tried():
    # The top of (1, 2, 4) at scores 70, 70, 40 lies between the first two values.
    inside = tuning.top_of({1e-3: 70.0, 2e-3: 70.0, 4e-3: 40.0}, 0.1)
    assert 1e-3 < inside.value < 2e-3
    assert not inside.edge
    low = tuning.top_of({1e-3: 70.0, 2e-3: 60.0, 4e-3: None}, 0.1)
    assert (low.value, low.rule, low.edge) == (1e-3, "best", True)
    high = tuning.top_of({1e-3: None, 2e-3: 60.0, 4e-3: 70.0}, 0.1)
    assert (high.value, high.rule, high.edge) == (4e-3, "best", True)
    between = tuning.top_of({1e-3: None, 2e-3: 70.0, 4e-3: 60.0, 8e-3: None}, 0.1)
    assert (between.value, between.edge) == (2e-3, False)


def test_the_grid_grows_at_its_edges_within_bounds():
    grid = [1e-3, 2e-3, 4e-3]
    assert tuning.next_value({1e-3: 50.0, 2e-3: 60.0, 4e-3: 55.0}, grid) is None
    assert tuning.next_value({1e-3: 60.0, 2e-3: 50.0, 4e-3: 40.0}, grid) == 5e-4
    points = dict.fromkeys(grid, 50.0) | {4e-3: 60.0}
    for further in (8e-3, 1.6e-2):
        assert tuning.next_value(points, grid) == further
        points[further] = max(points.values()) + 1
    assert tuning.next_value(points, grid) is None
    # What diverges does so from above: more values below, and none beyond.
    assert tuning.next_value({1e-3: 60.0, 2e-3: 70.0, 4e-3: None}, grid) == 5e-4
    assert tuning.next_value({1e-3: None, 2e-3: None, 4e-3: None}, grid) == 5e-4
