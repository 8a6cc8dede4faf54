"""Cells that crash, run out of memory or diverge are kept with their reason, and the others finish."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from fathoms.comparing import folder as comparison_folder
from tiny_comparisons import sabotage

# Real faults of the worker process: a segmentation fault for seed 1, an allocation that fails for seed 2.
FAULTS = """
import os, signal, sys
from pathlib import Path
if "-m" in sys.orig_argv and "fathoms.comparing.worker" in sys.orig_argv:
    import torch
    from fathoms.training.run import Trainer
    run = Trainer.run
    def faulty(self):
        seed = self.context.job.run.seed
        with Path(os.environ["ATTEMPTS"]).open("a") as file:
            print(self.context.job.folder.name, file=file)
        if seed == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if seed == 2:
            torch.empty(1 << 55)
        return run(self)
    Trainer.run = faulty
"""


@pytest.mark.slow
def test_a_crash_want_of_memory_and_divergence_are_reported_and_the_rest_finishes(
    comparisons, monkeypatch, tmp_path, capsys
):
    attempts = tmp_path / "attempts"
    monkeypatch.setenv("ATTEMPTS", str(attempts))
    words = ("--arm", "calm: lr=1e-3", "--arm", "wild: lr=1e30,opt=sgd", "--seeds", "3", "--jobs", "2")
    with monkeypatch.context() as faulty:
        sabotage(tmp_path / "faults", faulty, FAULTS)
        assert comparisons.run(*words) == 1
    rows = {(row["name"], row["seed"]): row for row in comparisons.rows()}
    assert rows["calm", 0]["status"] in ("done", "stalled")
    assert rows["wild", 0]["status"] == "diverged"
    assert "finite" in rows["wild", 0]["reason"]
    for arm in ("calm", "wild"):
        assert rows[arm, 1]["status"] == rows[arm, 2]["status"] == "failed"
        assert "killed by SIGSEGV" in rows[arm, 1]["reason"]
        assert "out of memory" in rows[arm, 2]["reason"]
    arms = {arm["name"]: arm for arm in comparisons.read("results.json")["arms"]}
    assert [(arms[a]["failed"], arms[a]["diverged"]) for a in ("calm", "wild")] == [(2, 0), (2, 1)]
    tried = attempts.read_text().split()
    # Once among others, once alone.
    assert all(tried.count(name) == 2 for name in tried if "seed1" in name or "seed2" in name)
    assert all(tried.count(name) == 1 for name in tried if "seed0" in name)
    failures = list(comparisons.folder().glob("cells/*/failed.json"))
    assert len(failures) == 4
    capsys.readouterr()
    # Given again, without the fault: only the failed ones run, and their failure is forgotten.
    assert comparisons.run(*words) == 0
    assert "2 of 6 runs are there already" in capsys.readouterr().out
    assert not list(comparisons.folder().glob("cells/*/failed.json"))
    after = {(row["name"], row["seed"]): row for row in comparisons.rows()}
    assert not [row for row in after.values() if row["status"] == "failed"]
    assert {key: after[key] for key in (("calm", 0), ("wild", 0))} == {
        key: rows[key] for key in (("calm", 0), ("wild", 0))
    }


# A real error of the device in the middle of seed 1: on a GPU an assertion that no later call of the process survives.
BAD_INDEX = """
import os, sys
from pathlib import Path
if "-m" in sys.orig_argv and "fathoms.comparing.worker" in sys.orig_argv:
    import torch
    from fathoms.training.run import Loop
    update = Loop.update
    def faulty(self, batch):
        update(self, batch)
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 1:
            with Path(os.environ["ATTEMPTS"]).open("a") as file:
                print(os.getpid(), self.context.job.run.seed, file=file)
        if self.context.job.run.seed == 1 and self.seen == 5:
            table = torch.zeros(4, 2, device=self.context.world.device)
            torch.nn.functional.embedding(torch.tensor([9], device=table.device), table)
    Loop.update = faulty
"""
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "reason", "tries"),
    [
        # b's first try was the first of its worker; a worker that dies leaves no word on that, so b is tried again.
        ("cpu", "index out of range", 3),
        pytest.param("cuda", "device-side assert", 4, marks=[pytest.mark.gpu, NO_GPU]),
    ],
)
def test_a_worker_is_renewed_after_an_error_of_the_device_and_the_rest_finishes(
    comparisons, monkeypatch, tmp_path, device, reason, tries
):
    attempts = tmp_path / "attempts"
    monkeypatch.setenv("ATTEMPTS", str(attempts))
    sabotage(tmp_path / "faults", monkeypatch, BAD_INDEX)
    words = ("--arm", "a: lr=1e-3", "--arm", "b: lr=2e-3", "--seeds", "3", "--epochs", "1")
    slots = ("--jobs", "1") if device == "cpu" else ("--per-gpu", "1")
    assert comparisons.run(*words, "--device", device, *slots) == 1
    rows = {(row["name"], row["seed"]): row for row in comparisons.rows()}
    for arm in ("a", "b"):
        assert rows[arm, 1]["status"] == "failed"
        assert reason in rows[arm, 1]["reason"]
        assert {rows[arm, seed]["status"] for seed in (0, 2)} <= {"done", "stalled"}
    cells = [tuple(map(int, line.split())) for line in attempts.read_text().splitlines()]
    # No process trains anything after its error; the cell that others came before was tried once more, alone.
    for place, (process, seed) in enumerate(cells):
        if seed == 1:
            assert process not in {later for later, _ in cells[place + 1 :]}
    assert sorted(seed for _, seed in cells) == [0, 0, *[1] * tries, 2, 2]


def test_a_full_disk_ends_the_comparison_in_one_line(comparisons, monkeypatch, capsys):
    """The results cannot be written after the first cell: an error of a thread, reported by the command."""

    def full(path, _data):
        if path.name == "results.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(comparison_folder, "write_atomic", full)
    assert comparisons.run("--axis", "norm=layernorm,dyt", "--seeds", "1", "--jobs", "2") == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert said.count("\n") == 1


def test_neither_a_worker_nor_the_runner_loads_scipy_or_sklearn():
    code = (
        "import sys, fathoms.comparing.worker, fathoms.comparing.runner, fathoms.training.run\n"
        "print([name for name in ('scipy', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
