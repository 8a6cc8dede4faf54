"""`--robustness`: finished runs on further image sets, kept in each run, shown beside top-1, and never judged."""

import csv
import json
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fathoms.cli.main import main
from fathoms.comparing.robustness import add_scores, kept_scores, lacking
from fathoms.data.sources.splits import open_held_out
from fathoms.errors import ConfigError

AXIS = ("--axis", "norm=layernorm,dyt", "--seeds", "1", "--epochs", "1", "--lr", "1e-2")


def write_set(path, share, seed=0):
    """Digits of two classes alone, of which a share is replaced by noise."""
    source, rng = open_held_out("digits"), np.random.default_rng(seed)
    images, labels = np.asarray(source.images).copy(), np.asarray(source.labels)
    kept = np.isin(labels, (3, 7))
    images, labels = images[kept], labels[kept]
    noisy = rng.random(len(images)) < share
    images[noisy] = rng.integers(0, 256, images[noisy].shape, dtype=np.uint8)
    np.savez(path, x_test=images, y_test=np.where(labels == 3, 0, 1), classes=np.array(["3", "7"]))


@pytest.mark.slow
def test_scores_are_those_of_validate_are_kept_and_change_no_verdict(comparisons, tmp_path, capsys):
    noisy = tmp_path / "noisy.npz"
    write_set(noisy, share=0.5)
    assert comparisons.run(*AXIS) == 0
    before, trained = comparisons.read("results.json"), run_files(comparisons)
    assert "robustness" not in json.dumps(before)
    more = (*AXIS, "--robustness", "digits", str(noisy))
    assert comparisons.run(*more) == 0
    assert "measuring 2 runs on digits, noisy.npz" in capsys.readouterr().out
    after = comparisons.read("results.json")
    for row in after["cells"]:
        # The digits are what the runs were scored on.
        assert row["robustness"]["digits"] == row["top1"]
        run = comparisons.folder() / row["run"]
        assert main(["validate", str(noisy), "--checkpoint", str(run / "checkpoints/last"), "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"].values()
        assert found["images"] < 100
        assert row["robustness"]["noisy.npz"] == found["top1"] != row["top1"]
    bare = [{key: value for key, value in row.items() if key != "robustness"} for row in after["cells"]]
    assert bare == before["cells"]
    for key in ("verdicts", "answer", "headline", "exploratory", "optimism"):
        assert after[key] == before[key]
    assert run_files(comparisons) == trained
    plan = comparisons.read("plan.json")
    assert plan["grown"] == []
    assert not plan["exploratory"]
    shown_in_every_file(comparisons, after)
    measured_again_is_only_what_changed(comparisons, more, noisy, capsys)
    refused_without_weights(comparisons, more, capsys)


def run_files(comparisons):
    """When each run ended, and its result."""
    files = sorted(comparisons.folder().glob("cells/*/summary.json"))
    return [(file.stat().st_mtime_ns, file.read_bytes()) for file in files]


def shown_in_every_file(comparisons, results):
    folder = comparisons.folder()
    table = (folder / "table.md").read_text()
    assert "| arm | seeds | top1 | digits | noisy.npz | sd |" in table
    page = (folder / "report.html").read_text()
    rows = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    for arm, cell, row in zip(results["arms"], results["cells"], rows, strict=True):
        on = cell["robustness"]["noisy.npz"]
        assert arm["robustness"] == cell["robustness"]
        assert f"| {arm['name']} | 1 | {arm['mean']:.2f} | {arm['mean']:.2f} | {on:.2f} |" in table
        assert float(row["noisy.npz"]) == on
        # Of the arm and of its run.
        assert len(re.findall(rf'data-v="{re.escape(str(on))}">{on:.2f}</td>', page)) >= 2
    assert page.count('<button type="button">noisy.npz</button>') == 2


def measured_again_is_only_what_changed(comparisons, more, noisy, capsys):
    runs = sorted(comparisons.folder().glob("cells/*"))
    kept = [kept_scores(run) for run in runs]
    assert comparisons.run(*more) == 0
    assert "measuring" not in capsys.readouterr().out
    (runs[0] / "robustness.json").unlink()
    assert comparisons.run(*AXIS) == 0
    # What is kept is shown without the flag, too.
    rows = {row["run"]: row for row in comparisons.rows()}
    assert ["robustness" in rows[f"cells/{run.name}"] for run in runs] == [False, True]
    capsys.readouterr()
    assert comparisons.run(*more) == 0
    assert "measuring 1 run on" in capsys.readouterr().out
    assert [kept_scores(run) for run in runs] == kept
    write_set(noisy, share=0.9, seed=1)
    assert comparisons.run(*more) == 0
    assert "measuring 2 runs on" in capsys.readouterr().out
    for run, before in zip(runs, kept, strict=True):
        now = kept_scores(run)
        assert now["digits"] == before["digits"]
        assert now["noisy.npz"]["fingerprint"] != before["noisy.npz"]["fingerprint"]


def refused_without_weights(comparisons, more, capsys):
    run = next(comparisons.folder().glob("cells/*"))
    (run / "checkpoints").rename(run / "gone")
    # Its scores are there already.
    assert comparisons.run(*more) == 0
    (run / "robustness.json").unlink()
    capsys.readouterr()
    assert comparisons.run(*more) == 2
    said = capsys.readouterr().err.strip()
    assert "--robustness: 1 finished run kept no weights, such as norm=" in said
    assert "\n" not in said


def test_what_cannot_be_measured_is_refused_before_anything_runs(comparisons, tmp_path):
    other = tmp_path / "other.npz"
    np.savez(
        other, x_test=np.zeros((4, 8, 8), np.uint8), y_test=np.arange(4) % 2, classes=np.array(["a", "b"])
    )
    (tmp_path / "twice").mkdir()
    write_set(tmp_path / "same.npz", share=0.0)
    write_set(tmp_path / "twice" / "same.npz", share=0.0)
    twice = [str(tmp_path / "same.npz"), str(tmp_path / "twice" / "same.npz")]
    for words, said in {
        ("--robustness", "digits", "--keep", "none"): "with --keep none",
        ("--robustness", "digits", "--shard", "1/2"): "without it",
        ("--robustness", str(other)): "the model has no class 'a'",
        ("--robustness", str(tmp_path / "none")): "none",
        ("--robustness", *twice): "two sets are called 'same.npz'",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            comparisons.make(*AXIS, *words)
    assert not comparisons.folder().exists()


@pytest.mark.plain
def test_what_is_stopped_between_two_runs_goes_on_with_the_second(tmp_path, monkeypatch):
    sets, stopping = {"digits": open_held_out("digits")}, threading.Event()
    cells = [
        SimpleNamespace(folder=tmp_path / name, job=SimpleNamespace(run=SimpleNamespace(device="cpu")))
        for name in "abc"
    ]
    for cell, status in zip(cells, ("done", "done", "diverged"), strict=True):
        (cell.folder / "checkpoints" / "last").mkdir(parents=True)
        (cell.folder / "summary.json").write_text(json.dumps({"status": status}))
    loaded = []

    def load(path):
        loaded.append(path.parts[-3])
        stopping.set()

    monkeypatch.setattr("fathoms.evaluating.load.load_run", load)
    found = SimpleNamespace(top1=50.0, loss=1.0, images=359)
    monkeypatch.setattr("fathoms.evaluating.held_out.measure", lambda *_: found)
    runner = SimpleNamespace(stopping=stopping, deadline=None)
    add_scores(cells, sets, runner, lambda _: None)
    assert loaded == ["a"]
    # A run that diverged is not among those that are left.
    assert lacking(cells, sets) == {tmp_path / "b": ["digits"]}
    stopping.clear()
    runner.deadline = 0.0
    add_scores(cells, sets, runner, lambda _: None)
    assert loaded == ["a"]
    runner.deadline = None
    add_scores(cells, sets, runner, lambda _: None)
    assert loaded == ["a", "b"]
    assert not lacking(cells, sets)


def test_damaged_scores_are_refused_by_their_file(tmp_path):
    (tmp_path / "robustness.json").write_text('{"v2": {"top1": 300.0, "loss": 1.0}}')
    with pytest.raises(ConfigError, match=r"robustness\.json: v2: top1 is no score; remove the file"):
        kept_scores(tmp_path)
