"""Comparisons on Slurm: the flag's mistakes, how cells are spread, and eight cells on a real cluster of one node."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comparing.one_node_slurm import CannotStartError, one_node_slurm, processes
from fathoms.cli.main import main
from fathoms.comparing.folder import ComparisonFolder, make_cell
from fathoms.comparing.slurm import JobBook, SlurmOptions, group, parameters, parse_slurm
from fathoms.comparing.slurm_task import Task
from fathoms.errors import FathomsError

TINY = [
    *("--seeds", "2", "--depth", "2", "--dim", "16", "--heads", "2", "--epochs", "4", "--batch-size", "96"),
    *("--device", "cpu", "--axis", "norm=layernorm,dyt,learnable_scaler,rmsnorm"),
]


def test_every_key_reaches_sbatch_under_its_own_name():
    text = "partition=gpu,gpus=2,time=1-02:03,cpus=8,mem=16G,account=lab,qos=low,constraint=a100|h100"
    assert parameters(parse_slurm(text), "name") == {
        "job_name": "name",
        "time": 1563,
        "signal_delay_s": 90,
        "partition": "gpu",
        "gpus_per_node": 2,
        "cpus_per_task": 8,
        "account": "lab",
        "qos": "low",
        "constraint": "a100|h100",
        "additional_parameters": {"mem": "16G"},
    }


def test_a_short_time_limit_is_not_all_warning():
    assert parameters(SlurmOptions(time=5), "name")["signal_delay_s"] == 75


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gpu=1", "no key is called 'gpu'; did you mean 'gpus'?"),
        ("time=4", "--slurm time=4: write a time of 5m or more, such as 30m, 4h or 1-12:00"),
        ("time=4m", "--slurm time=4m: write a time"),
        ("time=0-25:00", "--slurm time=0-25:00: write a time"),
        ("gpus=one", "--slurm gpus=one: use a whole number"),
        ("mem=lots", "--slurm mem=lots: write a size"),
        ("partition=a\n#SBATCH --wrap=x", "has characters that Slurm does not allow"),
        ("gpus=1,gpus=2", "--slurm gpus: given twice"),
        ("gpus", "--slurm 'gpus': write KEY=VALUE"),
        ("", "--slurm: takes a value"),
    ],
)
def test_a_mistake_in_the_flag_is_one_line_and_exit_2(text, line, capsys, tmp_path):
    code = main(["compare", *TINY, "--output", str(tmp_path), "--slurm", text])
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert line in said
    assert not list(tmp_path.iterdir())


def test_without_sbatch_the_flag_is_one_line_and_exit_2(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["compare", *TINY, "--output", str(tmp_path), "--slurm", "gpus=1"]) == 2
    assert "sbatch is not installed here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--wait"], "--wait would not be used"),
        (["--slurm", "gpus=1", "--budget", "1h"], "--budget would not"),
    ],
)
def test_flags_without_effect_are_refused(flags, line, capsys):
    assert main(["compare", *TINY, *flags]) == 2
    assert line in capsys.readouterr().err


def some_cells(tmp_path):
    from fathoms.cli import compare
    from fathoms.cli.flags.parse import parse

    args = parse(compare, "compare", TINY)
    arms = compare.make_jobs(args, compare.make_plan(args), {})
    return [
        make_cell(name, settings, seed, job, "", tmp_path / "cells")
        for seed in range(2)
        for name, (settings, job) in arms.items()
    ]


def test_a_task_holds_cells_of_one_architecture_and_no_more_than_asked(tmp_path):
    cells = some_cells(tmp_path)
    tasks = group(cells, None)
    assert [[cell.seed for cell in task] for task in tasks] == [[0, 1]] * 4
    assert all(len({cell.architecture for cell in task}) == 1 for task in tasks)
    assert [len(task) for task in group(cells, 1)] == [1] * 8
    assert group([], None) == []


def test_a_pickled_task_gives_back_its_cells_as_they_were(tmp_path):
    cells = some_cells(tmp_path)[:2]
    cells[1] = dataclasses.replace(cells[1], test=False, fingerprint="abc")
    task = pickle.loads(pickle.dumps(Task(str(tmp_path), "last", 1, 1).of(cells)))
    assert task.cells == cells


def fake_squeue(folder: Path, script: str, monkeypatch) -> None:
    (folder / "squeue").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_queue_names_the_cells_of_our_tasks_only(tmp_path, monkeypatch):
    tasks = group(some_cells(tmp_path), None)
    book = JobBook(ComparisonFolder(tmp_path))
    book.add("fathoms-a", tasks[:2])
    book.add("fathoms-b", tasks[2:3])
    fake_squeue(
        tmp_path, "printf '7_1|fathoms-a\\n8|fathoms-b\\n9_0|another\\n7_5|fathoms-a\\n'", monkeypatch
    )
    expected = {cell.folder.name for cell in (*tasks[1], *tasks[2])}
    assert JobBook(ComparisonFolder(tmp_path)).active() == expected


def test_a_queue_that_cannot_be_asked_is_an_error_and_not_an_empty_one(tmp_path, monkeypatch):
    fake_squeue(tmp_path, "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1", monkeypatch)
    with pytest.raises(FathomsError, match="squeue failed .*Unable to contact"):
        JobBook(ComparisonFolder(tmp_path)).active()


def until(ready, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


class Cluster:
    """One comparison on the cluster, and the task processes of its jobs."""

    def __init__(self, config: Path, root: Path, capsys) -> None:
        self.config, self.root, self.folder, self.capsys = config, root, root / "cluster", capsys

    def words(self, *flags: str, name: str = "cluster") -> list[str]:
        return ["compare", *TINY, "--output", str(self.root), "--experiment", name, *flags]

    def submit(self, *flags: str) -> tuple[int, str, str]:
        """The command's exit code and what it printed."""
        self.capsys.readouterr()
        code = main(self.words("--slurm", "partition=test,cpus=1,time=10m", *flags))
        return code, *self.capsys.readouterr()

    def slurm(self, *words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def queued(self) -> set[str]:
        return set(self.slurm("squeue", "--noheader", "--array", "--format", "%i").split())

    def trains(self, arm: str) -> bool:
        """Whether the arm's first run has ended an epoch."""
        return any(
            path.stat().st_size for path in self.folder.glob(f"cells/norm={arm}-seed0-*/metrics.jsonl")
        )

    def summary(self, arm: str) -> dict:
        (path,) = self.folder.glob(f"cells/norm={arm}-seed0-*/summary.json")
        return json.loads(path.read_text())

    def processes(self, task: int) -> dict[int, int]:
        """Processes that train in an array task, each with its parent."""
        # SLURM_STEP_ID is set in what srun started, not in the batch script.
        return processes(self.config, f"SLURM_ARRAY_TASK_ID={task}", "SLURM_STEP_ID=0")

    def task_process(self, task: int) -> int:
        """The process that Slurm started for an array task; its children are the workers."""
        found = self.processes(task)
        (first,) = [pid for pid, parent in found.items() if parent not in found]
        return first

    def step_daemon(self, task: int) -> int:
        """Slurm's own process over the task."""
        parent = self.processes(task)[self.task_process(task)]
        assert "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text()
        return parent


@pytest.fixture
def cluster(tmp_path, monkeypatch, capsys):
    """A comparison on a cluster of one node, which this process's environment points to."""
    pytest.importorskip("submitit", reason="submitit is not installed")
    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(one_node_slurm(tmp_path / "slurm"))
        except CannotStartError as error:
            pytest.skip(str(error))
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            monkeypatch.delenv(name)
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, environment[name])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield Cluster(Path(environment["SLURM_CONF"]), tmp_path, capsys)


@pytest.mark.slow
def test_eight_cells_with_a_cancelled_a_killed_and_a_requeued_task_equal_a_local_run(cluster):
    code, printed, errors = cluster.submit()
    assert code == 75, errors
    assert "submitted 8 runs in 4 tasks as job 1;" in printed
    actions = {
        "layernorm": lambda: cluster.slurm("scancel", "1_0"),
        "dyt": lambda: os.kill(cluster.task_process(1), signal.SIGKILL),
        # What Slurm sends shortly before the time limit.
        "learnable_scaler": lambda: cluster.slurm("scancel", "--signal", "USR2", "1_2"),
        "rmsnorm": lambda: os.kill(cluster.step_daemon(3), signal.SIGKILL),
    }

    def act_on_those_that_train():
        for arm in [arm for arm in actions if cluster.trains(arm)]:
            actions.pop(arm)()
        return not actions

    until(act_on_those_that_train, "all tasks train", 120)
    until(lambda: not cluster.processes(1) and not cluster.processes(3), "workers of dead tasks end", 10)
    # Slurm goes on waiting for a process of its own that was killed, until somebody cancels the job.
    cluster.slurm("scancel", "1_3")
    until(lambda: not {"1_0", "1_1", "1_3"} & cluster.queued(), "cancelled and killed tasks leave the queue")
    until(lambda: "Restarts=1" in cluster.slurm("scontrol", "show", "job", "1_2"), "the third is requeued")
    assert "1_2" in cluster.queued()
    # Both had the time to save; neither had the time to end.
    assert cluster.summary("layernorm")["status"] == "interrupted"
    assert "Exited with exit code 143" in (cluster.folder / "slurm" / "1_0_0_log.err").read_text()
    assert cluster.summary("learnable_scaler")["status"] == "interrupted"

    # At the same time: on its own it takes as long as the rest.
    command = [sys.executable, "-m", "fathoms", *cluster.words("--jobs", "1", name="local")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as local:
        code, printed, errors = cluster.submit("--wait")
        said, _ = local.communicate()
    assert (code, local.returncode) == (0, 0), printed + errors + said
    assert "in 3 tasks as job" in printed
    assert "queued or running already" in printed
    assert cluster.queued() == set()
    for name in ("results.json", "table.md", "results.csv"):
        assert (cluster.folder / name).read_bytes() == (cluster.root / "local" / name).read_bytes()
    rows = json.loads((cluster.folder / "results.json").read_text())["cells"]
    assert {row["status"] for row in rows} <= {"done", "stalled"}

    code, printed, _ = cluster.submit()
    assert (code, "submitted" in printed) == (0, False)


@pytest.mark.slow
def test_a_job_that_slurm_refuses_is_one_line(cluster):
    # The last one given counts.
    code, _, errors = cluster.submit("--slurm", "partition=nowhere")
    assert code == 2
    assert errors.startswith("fathoms compare: --slurm: sbatch refused the job (")
    assert "invalid partition" in errors
    assert errors.count("\n") == 1
