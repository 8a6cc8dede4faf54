"""`fathoms probe`: a summary that fits a screen, everything on request, and one line for a mistake."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fathoms.cli.main import main

SMALL = ["--depth", "3", "--dim", "16", "--heads", "2", "--batch-size", "8"]


def probe(capsys, *words):
    code = main(["probe", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def answer(capsys, *words):
    return json.loads(probe(capsys, *words, "--json").splitlines()[-1])


def test_the_summary_fits_a_screen_and_full_shows_every_branch(capsys):
    words = ["--depth", "30", "--dim", "16", "--heads", "2", "--batch-size", "4", "--steps", "0"]
    short = probe(capsys, *words).splitlines()
    assert len(short) <= 24
    assert max(map(len, short[:11])) <= 120
    assert short[1].split()[:4] == ["block", "branch", "stream", "ratio"]
    assert short[-2].startswith("Start: not judged (from the initialisation alone, which misleads)")
    assert short[-1].startswith(
        "Note: `fathoms train` takes the model of its recipe digits; to probe that, add --"
    )
    assert len(probe(capsys, *words, "--full").splitlines()) == len(short) + 60 + 2


def test_json_is_one_object_with_switches_verdict_and_steps(capsys):
    found = answer(capsys, *SMALL, "--norm", "dyt", "--norm-init", "0.8", "--lr", "0.002")
    assert (found["config"]["norm"], found["config"]["norm_init"]) == ("dyt", 0.8)
    assert len(found["sites"]) == 6
    assert found["sites"][0]["saturated"] is not None
    assert found["start"]["outcome"] in ("trains", "not judged")
    assert (found["steps"]["lr"], len(found["steps"]["losses"])) == (0.002, 50)


@pytest.mark.parametrize(
    ("words", "key"), [(["--steps", "0"], "sites"), (["--depths", "2,3"], "sweep")], ids=str
)
def test_another_seed_shows_another_signal_and_the_same_seed_the_same(capsys, words, key):
    sizes = ["--dim", "16", "--heads", "2", "--batch-size", "2", *words]
    zero, again, one = (answer(capsys, *sizes, "--seed", seed)[key] for seed in ("0", "0", "1"))
    assert zero == again != one


def test_a_norm_free_stack_is_not_called_healthy(capsys):
    """At initialisation its ratios look best of all; the steps show that nothing holds the stream."""
    words = ["--norm", "none", "--depth", "24", "--dim", "32", "--heads", "2", "--batch-size", "16"]
    words += ["--lr", "2e-2"]
    found = answer(capsys, *words)
    assert found["growth"] == pytest.approx(1.0, abs=0.1)
    assert found["start"]["outcome"] != "trains"
    assert f"{len(found['steps']['losses'])} steps" in "\n".join(found["words"])


def test_an_exploding_stack_names_the_factor(capsys):
    words = [
        "--norm",
        "none",
        "--residual",
        "rezero",
        "--residual-init",
        "1",
        "--depth",
        "24",
        "--steps",
        "0",
    ]
    text = probe(capsys, *words, "--batch-size", "4")
    assert "the gradient explodes by x" in text


@pytest.mark.parametrize("depth", ["2", "4"])
@pytest.mark.parametrize("placement", ["pre", "keel"])
def test_a_shallow_model_that_trains_is_not_told_to_diverge(capsys, depth, placement):
    words = ["--depth", depth, "--attn-placement", placement, "--mlp-placement", placement]
    text = probe(capsys, *words, "--batch-size", "32")
    assert "Start: expected to train (adamw at lr 0.001, 50 steps, loss " in text


def test_the_head_is_of_the_data_s_classes(capsys):
    words = ["vit_tiny_patch16_224", "--image-size", "32", "--depth", "6", "--dim", "24", "--lr", "3e-3"]
    words += ["--batch-size", "2", "--steps", "0"]
    assert answer(capsys, *words)["config"]["num_classes"] == 10
    assert answer(capsys, *words, "--num-classes", "12")["config"]["num_classes"] == 12


@pytest.mark.parametrize("splits", [["train"], ["train", "val"], ["train", "test"], ["train", "val", "test"]])
def test_data_of_any_splits_are_probed_on_their_training_images(capsys, tmp_path, splits):
    arrays = {}
    for place, split in enumerate(splits):
        arrays[f"x_{split}"] = np.full((12, 8, 8, 3), 80 * place, np.uint8)
        arrays[f"y_{split}"] = np.arange(12) % 3
    np.savez(tmp_path / "d.npz", **arrays)
    words = ["vit_digits", str(tmp_path / "d.npz"), "--in-channels", "3", *SMALL, "--steps", "2"]
    found = answer(capsys, *words)
    assert (found["config"]["num_classes"], len(found["steps"]["losses"])) == (3, 2)


def test_the_note_on_the_default_names_the_flags_that_train_takes_and_ends_with_them(capsys):
    words = ["--depth", "2", "--batch-size", "8", "--steps", "0"]
    note = probe(capsys, *words).splitlines()[-1]
    assert note.endswith("add --dim 48 --residual rezero --stem-init trunc_normal")
    assert "Note:" not in probe(capsys, *words, *note.split("add ")[1].split())
    assert "Note:" not in probe(capsys, "vit_digits", *words)


def test_counts_of_one_have_no_plural_and_all_branches_are_called_all(capsys):
    head = probe(capsys, *SMALL[2:6], "--depth", "1", "--batch-size", "1", "--steps", "1").splitlines()[0]
    assert head == "vit_digits: 1 block, 1 image; 2 branches (--full shows every column)"


def test_pictures_that_were_written_are_named(capsys, tmp_path):
    text = probe(capsys, *SMALL, "--steps", "0", "--figures", str(tmp_path / "out"))
    assert text.splitlines()[-1].startswith(f"written: {tmp_path / 'out'}")
    assert str(tmp_path / "out" / "probe.html") in text


def test_pictures_and_page_are_written(capsys, tmp_path):
    words = [*SMALL, "--stem-norm", "dual", "--attention", "talking_heads", "--residual", "layerscale"]
    found = answer(capsys, *words, "--steps", "3", "--figures", str(tmp_path / "out"))
    names = {"depth", "depth_after_steps", "scales", "pixel_scale", "filters", "attention", "head_mixing"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {f"{name}{end}" for name in names for end in (".svg", ".png", ".json")} | {"probe.html"}
    assert len(found["figures"]) == len(files)
    page = (tmp_path / "out" / "probe.html").read_text()
    assert "Start: " in page
    assert "src=" not in page
    assert page.count("<svg ") == 9, "a picture each, and those by depth once more for a phone"
    assert json.loads((tmp_path / "out" / "pixel_scale.json").read_text())[0]["centre"] == 1.0
    again = [*SMALL, "--steps", "0", "--figures", str(tmp_path / "out")]
    assert main(["probe", *again]) == 2
    assert "depth.svg: is there already; give another name, or --overwrite" in capsys.readouterr().err
    (tmp_path / "out" / "depth.svg").write_text("mine")
    assert "figures" in answer(capsys, *again, "--overwrite")
    assert (tmp_path / "out" / "depth.svg").read_text() != "mine"


def test_a_sweep_prints_a_line_per_depth_and_value(capsys, tmp_path):
    words = [
        "--depths",
        "2,4",
        "--axis",
        "residual=none,layerscale",
        "--dim",
        "16",
        "--heads",
        "2",
        "--batch-size",
        "4",
    ]
    lines = probe(capsys, *words, "--figures", str(tmp_path)).splitlines()
    assert lines[0].split()[:3] == ["residual", "depth", "growth"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        [v, d] for v in ("none", "layerscale") for d in ("2", "4")
    ]
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert stored["layerscale"]["4"]["ratio_median"] < stored["none"]["4"]["ratio_median"]


def test_the_coordinate_check_has_a_command(capsys, tmp_path):
    words = ["--coordinates", "depth=2,6", "--dim", "16", "--heads", "2", "--batch-size", "4", "--steps", "3"]
    found = answer(capsys, *words, "--figures", str(tmp_path))
    assert found["axis"] == "depth"
    assert found["verdict"] in ("flat", "growing", "vanishing", "unclear")
    assert len(found["trajectories"]) == 6
    assert (tmp_path / "coordinates.png").stat().st_size > 1000
    assert "Coordinate check: " in probe(capsys, *words)


def test_a_model_without_a_head_is_judged_from_its_initialisation(capsys):
    words = ["--depth", "2", "--dim", "32", "--heads", "2", "--num-classes", "0", "--steps", "0"]
    assert answer(capsys, *words)["steps"] is None


def test_a_run_folder_is_judged_by_its_drift(capsys, tmp_path):
    words = ["train", "--model", "vit_digits", "--depth", "2", "--dim", "16", "--heads", "2", "--epochs", "1"]
    words += ["--batch-size", "64", "--probe-interval", "4", "--device", "cpu", "--output", str(tmp_path)]
    assert main([*words, "--experiment", "run"]) == 0
    capsys.readouterr()
    found = answer(capsys, str(tmp_path / "run"), "--batch-size", "4")
    assert found["trained"]
    assert found["drift"]["outcome"] in ("steady", "drifts")
    assert f"Drift: {found['drift']['outcome']}" in probe(capsys, str(tmp_path / "run"), "--batch-size", "4")
    assert main(["probe", str(tmp_path / "run"), "--lr", "1e-2"]) == 2
    assert f"--lr 0.01: would not be used, since {tmp_path / 'run'} is trained" in capsys.readouterr().err
    assert main(["probe", str(tmp_path / "run"), "--norm", "dyt"]) == 2
    said = capsys.readouterr().err
    assert f"--norm: {tmp_path / 'run'} was trained with norm layernorm, not dyt; leave it out" in said
    assert said.endswith("leave it out\n")
    rows = tmp_path / "run" / "probe.jsonl"
    later = [{**json.loads(line), "version": 99} for line in rows.read_text().splitlines()]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in later))
    assert main(["probe", str(tmp_path / "run"), "--batch-size", "4"]) == 2
    assert "probe.jsonl: line 1 has version 99, this fathoms reads up to 2; use " in capsys.readouterr().err
