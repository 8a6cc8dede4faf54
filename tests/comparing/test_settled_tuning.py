"""Tuned values once scores are known: they stay, whatever becomes of trials that had failed. No run is trained here."""

import json
import shutil
import threading

import pytest

from fathoms.comparing.tuning import chosen_before
from fathoms.errors import ConfigError

pytestmark = pytest.mark.plain

WORDS = ("--axis", "norm=layernorm,dyt", "--seeds", "1", "--tune", "lr=1e-3,2e-3", "--tune-epochs", "1")
AGAIN = "what was chosen stays, and trials that failed are not tried again"


def plant(cell, top1):
    """A run that ended with this accuracy."""
    measured = {"top1": top1, "loss": 1.0, "epoch": 2}
    cell.folder.mkdir(parents=True, exist_ok=True)
    table = {"status": "done", "reason": None, "last": measured, "test": measured}
    (cell.folder / "summary.json").write_text(json.dumps(table))
    (cell.folder / "failed.json").unlink(missing_ok=True)


class NoRuns:
    """In the place of a runner: keeps what it was to run."""

    def __init__(self, asked):
        self.asked, self.stopping = asked, threading.Event()

    def stop(self):
        """As a signal would."""

    kill = stop

    def run(self, cells):
        self.asked += [cell.arm for cell in cells]


@pytest.fixture
def command(comparisons, monkeypatch):
    """Gives the command again; returns the comparison, the runs it would train and what it said."""

    def give(*words):
        comparison, asked, said = comparisons.make(*(words or WORDS)), [], []
        comparison.folder.path.mkdir(parents=True, exist_ok=True)
        plan = comparison.folder.begin(comparison.plan())
        monkeypatch.setattr(comparison, "make_runner", lambda _: NoRuns(asked))
        _, code = comparison.work(plan, said.append)
        return comparison, asked, said, code

    return give


@pytest.fixture
def settled(comparisons, command):
    """Each arm has a trial at 1e-3 with 50 %, one at 2e-3 that failed, and a run at 1e-3 that has ended."""
    comparison = comparisons.make(*WORDS)
    for trial in comparison.trials():
        if trial.choice["lr"] == "1e-3":
            plant(trial.cell, 50.0)
        else:
            comparison.folder.note_failure(trial.cell, "out of memory")
    _, asked, said, _ = command()
    assert asked == ["norm=layernorm, lr=2e-3", "norm=dyt, lr=2e-3", "norm=layernorm", "norm=dyt"]
    assert not any(AGAIN in line for line in said)
    plant(comparison.cells({name: {"lr": "1e-3"} for name in comparison.arms})[0], 60.0)
    return comparison


@pytest.mark.usefixtures("settled")
def test_a_failed_trial_is_not_tried_again_once_a_run_has_ended(command):
    _, asked, said, code = command()
    assert asked == ["norm=dyt"], "the run that is missing, and no trial"
    assert sum(AGAIN in line for line in said) == 1
    assert code == 75


def test_a_trial_that_succeeds_later_does_not_change_what_was_chosen(settled, command, comparisons):
    for trial in settled.trials():
        plant(trial.cell, 90.0 if trial.choice["lr"] == "2e-3" else 50.0)
    _, asked, _, _ = command()
    assert asked == ["norm=dyt"]
    assert [arm["best"] for arm in comparisons.read("tuning.json")["arms"]] == [{"lr": "1e-3"}] * 2
    assert [row["status"] for row in comparisons.rows()] == ["done", "pending"]


@pytest.mark.parametrize("gone", ["trials", "file"])
def test_a_choice_outlives_the_folders_of_its_trials_and_the_file(settled, command, comparisons, gone):
    if gone == "trials":
        shutil.rmtree(settled.folder.tuning)
    else:
        (settled.folder.path / "tuning.json").unlink()
    for cell in settled.cells({name: {"lr": "1e-3"} for name in settled.arms}):
        plant(cell, 60.0)
    _, asked, _, code = command()
    assert asked == []
    assert code == (0 if gone == "trials" else 1)
    assert [arm["best"] for arm in comparisons.read("tuning.json")["arms"]] == [{"lr": "1e-3"}] * 2


@pytest.mark.usefixtures("settled")
def test_an_arm_that_is_added_later_is_tuned(command):
    words = tuple(word.replace("layernorm,dyt", "layernorm,dyt,derf") for word in WORDS)
    _, asked, said, _ = command(*words)
    assert asked == ["norm=derf, lr=1e-3", "norm=derf, lr=2e-3"]
    assert said[-1].startswith("trials are missing")


@pytest.mark.parametrize("text", ["{", '{"arms": 3}', '{"arms": [{"name": "a"}]}', '{"arms": [{"best": 1}]}'])
def test_a_damaged_tuning_file_is_one_line(settled, text):
    (settled.folder.path / "tuning.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tuning\.json: .*; remove the file"):
        chosen_before(settled.folder)
