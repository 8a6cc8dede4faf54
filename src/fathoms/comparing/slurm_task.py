"""A task of a Slurm job array: trains its cells with the workers of a comparison, and is requeued at its time limit.

Slurm sends its signals to every process of a task. SIGTERM (scancel, preemption) reaches the workers by itself: they
save, and the task exits with 143. SIGUSR2 comes shortly before the time limit and is submitit's; workers do not see
it. submitit then calls `checkpoint`, which asks the workers to save, and requeues the task.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathoms.comparing.folder import Cell, ComparisonFolder, stale
from fathoms.comparing.progress import Progress
from fathoms.comparing.runner import Runner, make_slots
from fathoms.comparing.worker import watch_parent
from fathoms.machine import visible_gpus

STOPPED = 143
LOOK = 0.2
"""Seconds between looks at whether a signal came or the cells ended."""


@dataclass
class Task:
    """Cells that one task trains; submitit pickles it.

    Args:
        root: The comparison's folder.
        keep: Which checkpoints of an ended cell stay: none, last or all.
        jobs: Cells at a time on CPUs; 0 takes one.
        per_gpu: Cells that share a GPU.
        cells: The cells.
        directory: Where the command was given; paths of cells and data may be relative to it.
    """

    root: str
    keep: str
    jobs: int
    per_gpu: int
    cells: list[Cell] = field(default_factory=list)
    directory: str = field(default_factory=os.getcwd)
    # Signal handlers only set these: a lock that the interrupted code holds would never be freed.
    _terminated: bool = field(default=False, init=False)
    _leaving: bool = field(default=False, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def of(self, cells: Sequence[Cell]) -> Task:
        """This task with the cells that it is to train."""
        return dataclasses.replace(self, cells=list(cells))

    def __call__(self) -> None:
        """Train what is missing; called by submitit in the job, also after each requeue."""
        # Without it, cells would go on after a kill of Slurm's own process, while Slurm takes the job for dead.
        threading.Thread(target=watch_parent, args=(os.getppid(), False), daemon=True).start()
        signal.signal(signal.SIGTERM, self._hear)
        os.chdir(self.directory)
        if "SLURM_CPUS_PER_TASK" in os.environ:
            os.environ.setdefault("OMP_NUM_THREADS", os.environ["SLURM_CPUS_PER_TASK"])
        folder = ComparisonFolder(Path(self.root))
        todo = stale(self.cells, folder)
        if not todo:
            return
        slots = make_slots(self.jobs or 1, visible_gpus(todo[0].job.run.device), self.per_gpu)
        progress = Progress(folder, len(slots), self.keep, lambda line: print(line, flush=True), lambda: "")
        progress.ahead = list(todo)
        runner = Runner(slots, folder.path / "slurm" / f"workers-{job_name()}", progress)
        self._run(runner, todo)
        progress.close()
        if self._terminated and stale(todo, folder):
            sys.exit(STOPPED)

    def checkpoint(self) -> Any:
        """The task to requeue, once its workers have saved; submitit calls it from its signal handler."""
        from submitit.helpers import DelayedSubmission

        self._leaving = True
        while self._thread is not None and self._thread.is_alive():
            time.sleep(LOOK)
        return DelayedSubmission(dataclasses.replace(self))

    def _hear(self, *_: object) -> None:
        self._terminated = True

    def _run(self, runner: Runner, cells: Sequence[Cell]) -> None:
        """Train in a thread, whose signal mask the workers inherit; the main thread takes the signals."""
        self._thread = threading.Thread(target=_without_user_signals, args=(runner, cells), daemon=True)
        self._thread.start()
        threading.Thread(target=self._pass_on, args=(runner,), daemon=True).start()
        while self._thread.is_alive():
            time.sleep(LOOK)

    def _pass_on(self, runner: Runner) -> None:
        while not (self._terminated or self._leaving):
            time.sleep(LOOK)
        if self._leaving:
            runner.stop()
        else:
            # Slurm has sent them SIGTERM too, and a second one would end them unsaved.
            runner.stopping.set()


def _without_user_signals(runner: Runner, cells: Sequence[Cell]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    runner.run(cells)


def job_name() -> str:
    """The id of this array task, such as 12_3."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array else os.environ.get("SLURM_JOB_ID", "0")
