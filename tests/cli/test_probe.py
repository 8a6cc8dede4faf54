"""`fathoms probe`: a summary that fits a screen, everything on request, and one line for a mistake."""

from __future__ import annotations

import json

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
    assert short[-2].startswith("Start: expected to train (from the initialisation alone)")
    assert short[-1].startswith(
        "Note: `fathoms train` takes the model of its recipe digits; to probe that, add --"
    )
    assert len(probe(capsys, *words, "--full").splitlines()) == len(short) + 60 + 2


def test_json_is_one_object_with_switches_verdict_and_steps(capsys):
    found = answer(capsys, *SMALL, "--norm", "dyt", "--norm-init", "0.8", "--lr", "0.002")
    assert (found["config"]["norm"], found["config"]["norm_init"]) == ("dyt", 0.8)
    assert len(found["sites"]) == 6
    assert found["sites"][0]["saturated"] is not None
    assert found["start"]["outcome"] == "trains"
    assert (found["steps"]["lr"], len(found["steps"]["losses"])) == (0.002, 10)


def test_a_norm_free_stack_is_not_called_healthy(capsys):
    """At initialisation its ratios look best of all; ten steps show that nothing holds the stream.

    At 1e-3 such a stack does train, as the calibration found; at 2e-2 this one diverges.
    """
    words = ["--norm", "none", "--depth", "24", "--dim", "32", "--heads", "2", "--batch-size", "16"]
    words += ["--lr", "2e-2"]
    found = answer(capsys, *words)
    assert found["growth"] == pytest.approx(1.0, abs=0.1)
    assert found["start"]["outcome"] != "trains"
    assert "10 steps" in probe(capsys, *words)


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
    assert "expected to DIVERGE" in text
    assert "the gradient explodes by x" in text


@pytest.mark.parametrize("depth", ["2", "4"])
@pytest.mark.parametrize("placement", ["pre", "keel"])
def test_a_shallow_model_that_trains_is_not_told_to_diverge(capsys, depth, placement):
    words = ["--depth", depth, "--attn-placement", placement, "--mlp-placement", placement]
    text = probe(capsys, *words, "--batch-size", "32")
    assert "Start: expected to train (adamw at lr 0.001, 10 steps, loss " in text
    assert "came true" not in text


@pytest.mark.parametrize(
    ("words", "told"),
    [([], True), (["--steps", "3"], False), (["--opt", "sgd"], False), (["--batch-size", "4"], False)],
)
def test_the_share_that_came_true_is_told_where_it_was_measured(capsys, words, told):
    text = probe(capsys, "--depth", "6", "--dim", "16", "--heads", "2", "--batch-size", "8", *words)
    assert ("came true" in text) == told


def test_the_note_on_the_default_names_the_flags_that_train_takes_and_ends_with_them(capsys):
    words = ["--depth", "2", "--batch-size", "8", "--steps", "0"]
    note = probe(capsys, *words).splitlines()[-1]
    assert note.endswith("add --dim 48 --residual rezero")
    assert "Note:" not in probe(capsys, *words, "--dim", "48", "--residual", "rezero")
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
    found = answer(capsys, *words, "--figures", str(tmp_path / "out"))
    names = {"depth", "depth_after_steps", "scales", "pixel_scale", "filters", "attention", "head_mixing"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {f"{name}{end}" for name in names for end in (".svg", ".png", ".json")} | {"probe.html"}
    assert len(found["figures"]) == len(files)
    page = (tmp_path / "out" / "probe.html").read_text()
    assert "expected to" in page
    assert "src=" not in page
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


@pytest.mark.plain
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--axis", "norm=dyt"], "--axis would not be used: it goes with --depths; add that"),
        (
            ["--depths", "2", "--lr", "0.1"],
            "--lr 0.1 would not be used: --depths probes models before any step",
        ),
        (["--depths", "2", "--opt", "sgd"], "--opt sgd would not be used: --depths"),
        (["--depths", "2", "--steps", "5"], "--steps 5 would not be used: --depths"),
        (
            ["vit_digits", "--depths", "2", "--model", "cait_s24_224"],
            "--model cait_s24_224 would not be used: TARGET names the model; leave it out",
        ),
        (["--depths", "2,x"], "--depths '2,x': write whole numbers above 0 with commas, such as 12,24,48"),
        (
            ["--depths", "2", "--axis", "norm=dty"],
            "--axis norm=dty: no value is called 'dty'; did you mean 'dyt'?",
        ),
        (["--depths", "2", "--axis", "lr=1e-3"], "--axis lr: is not an option of a model"),
        (
            ["--coordinates", "heads=2,4"],
            "--coordinates heads=2,4: sizes are depth or dim; write depth=6,12,24,48",
        ),
        (["--coordinates", "dim=24,30"], "--coordinates dim=24: heads are 16 wide; use multiples of 16"),
        (
            ["--coordinates", "depth=4"],
            "--coordinates depth=4: one size gives no slope; give two or more with commas",
        ),
        (["--coordinates", "depth"], "--coordinates depth: has no sizes; write depth=6,12,24,48"),
        (["--coordinates", "dim="], "--coordinates dim=: has no sizes; write dim=64,128,256"),
        (
            ["timm/vit_tiny_patch16_224", "--depths", "2,4"],
            "TARGET timm/vit_tiny_patch16_224: --depths builds a model at several sizes, which fathoms' own can; give",
        ),
        (
            ["tests", "--coordinates", "depth=2,4"],
            "TARGET tests: --coordinates builds a model at several sizes",
        ),
        (
            ["--depth", "3", "--class-token-block", "3"],
            "leaves the blocks 0-2 of this model; use one of them",
        ),
        (
            ["--depth", "2", "--dim", "32", "--num-classes", "0"],
            "--num-classes 0: a model without a head has no classes to take steps on; add --steps 0",
        ),
        (["--coordinates", "depth=1,2", "--num-classes", "0"], "--num-classes 0: a model without a head"),
        (["--lr", "-1"], "--lr -1.0: use a number above 0"),
        (["runs/typo"], "TARGET runs/typo: no such file or folder"),
        (["vit_digits", "nowhere"], "nowhere"),
        (
            ["timm/vit_tiny_patch16_224", "--depth", "3"],
            "--depth: a timm model is built as its name says; leave it out",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys, words, message):
    assert main(["probe", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


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
    assert f"--norm: {tmp_path / 'run'} was trained as another model (" in said
    assert said.endswith("leave it out\n")
    rows = tmp_path / "run" / "probe.jsonl"
    later = [{**json.loads(line), "version": 99} for line in rows.read_text().splitlines()]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in later))
    assert main(["probe", str(tmp_path / "run"), "--batch-size", "4"]) == 2
    assert "probe.jsonl: line 1 has version 99, this fathoms reads up to 2; use " in capsys.readouterr().err
