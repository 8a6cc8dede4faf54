"""Slurm: submit the missing cells of a comparison as one job array, through submitit.

submitit pickles each task into `slurm/` of the comparison folder and unpickles it in the job: whoever may write that
folder may run code in the user's jobs, as with any job script. Nothing here unpickles: what is queued is asked of
Slurm, which cells a job holds is in `slurm/jobs.json`, and results are gathered from the JSON of the run folders.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fathoms.comparing.folder import MAX_FILE, Cell, ComparisonFolder, stale
from fathoms.comparing.slurm_task import Task
from fathoms.errors import ConfigError, FathomsError
from fathoms.files import write_atomic
from fathoms.registry import check_name
from fathoms.text_table import plural
from fathoms.untrusted import read_json

MAX_TIMEOUTS = 1000
"""Times that a task may be requeued at its time limit; each time it resumes, so it always gets further."""
WARNING = 90
"""Seconds before the time limit at which Slurm signals a task, which then saves and is requeued."""
LEAST = 5
"""Shortest time limit in minutes: Slurm's signal comes up to a minute early, and a task must get further each time."""
POLL = 5.0
"""Seconds between looks at the queue."""
UNITS = {"m": 1, "h": 60, "d": 1440}


@dataclass(frozen=True)
class SlurmOptions:
    """Resources of one task, and how cells are spread over tasks.

    Args:
        partition: Slurm's partition; None takes the cluster's default.
        gpus: GPUs of a task; one cell runs on each.
        time: Time limit of a task in minutes; a longer one is requeued and resumes.
        cpus: CPU cores of a task; None takes the cluster's default.
        mem: Memory of a task, such as 16G.
        account: Account to charge.
        qos: Quality of service.
        constraint: Features that the node must have.
        cells: Most cells of one task; None puts all of an architecture into one.
        wait: Wait until no job of this comparison is queued or running.
    """

    partition: str | None = None
    gpus: int | None = None
    time: int = 240
    cpus: int | None = None
    mem: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cells: int | None = None
    wait: bool = False


KEYS = ("partition", "gpus", "time", "cpus", "mem", "account", "qos", "constraint", "cells")


def parse_slurm(text: str, wait: bool = False) -> SlurmOptions:
    """Options written as KEY=VALUE,KEY=VALUE.

    >>> parse_slurm("partition=gpu,gpus=1,time=1-12:00").time
    2160
    """
    given: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key or equals:
            check_name(key, KEYS, "key", "--slurm")
        if not equals or not value:
            raise ConfigError(f"--slurm {pair.strip()!r}: write KEY=VALUE, such as time=4h")
        if key in given:
            raise ConfigError(f"--slurm {key}: given twice; leave one of them out")
        given[key] = _value(key, value)
    return SlurmOptions(**given, wait=wait)


def _value(key: str, value: str) -> int | str:
    if key == "time":
        return parse_minutes(value)
    if key in ("gpus", "cpus", "cells"):
        if not re.fullmatch(r"[1-9]\d{0,5}", value):
            raise ConfigError(f"--slurm {key}={value}: use a whole number of 1 or more")
        return int(value)
    if key == "mem" and not re.fullmatch(r"\d{1,9}[KMGT]?", value):
        raise ConfigError(f"--slurm mem={value}: write a size, such as 16G")
    # The value ends in a line of a job script.
    if not re.fullmatch(r"[\w.:&|()\[\]*@+-]{1,200}", value):
        raise ConfigError(f"--slurm {key}={value!r}: has characters that Slurm does not allow there")
    return value


def parse_minutes(text: str) -> int:
    """Minutes of a time such as 30m, 4h, 2d or Slurm's D-HH:MM.

    >>> parse_minutes("4h"), parse_minutes("1-00:30")
    (240, 1470)
    """
    short = re.fullmatch(r"(\d{1,6})([mhd])", text)
    long = re.fullmatch(r"(\d{1,4})-(\d{1,2}):(\d{2})", text)
    minutes = 0
    if short:
        minutes = int(short[1]) * UNITS[short[2]]
    elif long and int(long[2]) < 24 and int(long[3]) < 60:
        minutes = int(long[1]) * 1440 + int(long[2]) * 60 + int(long[3])
    if minutes < LEAST:
        raise ConfigError(
            f"--slurm time={text}: write a time of {LEAST}m or more, such as 30m, 4h or 1-12:00"
        )
    return minutes


def check_installed() -> None:
    """An error unless Slurm's commands and submitit are there."""
    for command in ("sbatch", "srun", "squeue"):
        if shutil.which(command) is None:
            raise ConfigError(
                f"--slurm: {command} is not installed here; run it on a login node of the cluster"
            )
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("--slurm: submitit is not installed; pip install 'fathoms[slurm]'")


class JobBook:
    """`slurm/jobs.json`: which cells each job array holds.

    An array is entered under its unique job name before it is submitted, so that no kill of this process can leave
    one in the queue that is not known here.
    """

    def __init__(self, folder: ComparisonFolder) -> None:
        self.path = folder.own(folder.path / "slurm") / "jobs.json"
        arrays = read_json(self.path, ConfigError, MAX_FILE).get("arrays") if self.path.is_file() else {}
        if not isinstance(arrays, dict):
            raise ConfigError(
                f"{self.path}: does not hold job arrays; cancel this comparison's jobs and delete it"
            )
        self.arrays: dict[str, list[list[str]]] = arrays

    def add(self, name: str, tasks: Sequence[Sequence[Cell]]) -> None:
        """Enter an array that is about to be submitted."""
        self.arrays[name] = [[cell.folder.name for cell in task] for task in tasks]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps({"version": 1, "arrays": self.arrays}, indent=1).encode() + b"\n")

    def active(self) -> set[str]:
        """Names of the cells that are queued or running."""
        # --array gives each task a line.
        command = ["squeue", "--noheader", "--array", "--user", str(os.getuid()), "--format", "%i|%j"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FathomsError(
                f"--slurm: squeue failed ({_one_line(done.stderr)}); give the same command again"
            )
        cells: set[str] = set()
        for line in done.stdout.splitlines():
            job, _, name = line.strip().partition("|")
            # A single task is submitted without an array, and its id has no index.
            tasks, index = self.arrays.get(name, []), int(job.partition("_")[2] or 0)
            if index < len(tasks):
                cells.update(tasks[index])
        return cells


def group(cells: Sequence[Cell], most: int | None) -> list[list[Cell]]:
    """Cells of each task: those of one architecture, at most `most`."""
    by_architecture: dict[str, list[Cell]] = {}
    for cell in cells:
        by_architecture.setdefault(cell.architecture, []).append(cell)
    return [
        own[start : start + (most or len(own))]
        for own in by_architecture.values()
        for start in range(0, len(own), most or len(own))
    ]


@dataclass
class Submission:
    """The cells of a comparison on a Slurm cluster.

    Args:
        folder: The comparison's folder.
        options: Resources of a task.
        task: A task without cells.
        say: Takes a line for the user.
        stopping: Set to wait no longer.
    """

    folder: ComparisonFolder
    options: SlurmOptions
    task: Task
    say: Callable[[str], None]
    stopping: threading.Event = field(default_factory=threading.Event)
    deadline: None = None

    def run(self, cells: Sequence[Cell]) -> None:
        """Submit the missing cells that are neither queued nor running; wait for them if asked to."""
        book = JobBook(self.folder)
        active = book.active()
        # Looked at after the queue: a cell that left the queue has ended by now, or is to be submitted again.
        missing = stale(cells, self.folder)
        waiting = [cell for cell in missing if cell.folder.name in active]
        free = [cell for cell in missing if cell.folder.name not in active]
        if waiting:
            self.say(f"{plural(len(waiting), 'run')} queued or running already")
        if free:
            self._submit(free, book)
        if self.options.wait:
            self._wait([*waiting, *free], book)
        elif waiting or free:
            self.say("give the same command again to gather results and to submit what is missing then")

    def _submit(self, cells: Sequence[Cell], book: JobBook) -> None:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        name, groups = f"fathoms-{uuid.uuid4().hex[:12]}", group(cells, self.options.cells)
        book.add(name, groups)
        executor = SlurmExecutor(self.folder.path / "slurm", max_num_timeout=MAX_TIMEOUTS)
        executor.update_parameters(**parameters(self.options, name))
        for cell in cells:
            self.folder.forget_failure(cell)
        try:
            # submitit prints what sbatch says, and raises it too.
            with contextlib.redirect_stderr(io.StringIO()), executor.batch():
                jobs = [executor.submit(self.task.of(own)) for own in groups]
        except FailedJobError as error:
            raise FathomsError(f"--slurm: sbatch refused the job ({_one_line(str(error))})") from error
        number = jobs[0].job_id.partition("_")[0]
        self.say(
            f"submitted {plural(len(cells), 'run')} in {plural(len(groups), 'task')} as job {number}; "
            f"squeue -j {number} shows it, scancel {number} ends it; logs in {self.folder.path / 'slurm'}"
        )

    def stop(self) -> None:
        """Wait no longer; the jobs stay. Safe in a signal handler."""
        self.stopping.set()

    kill = stop

    def _wait(self, cells: Sequence[Cell], book: JobBook) -> None:
        names, told = {cell.folder.name for cell in cells}, -1
        while not self.stopping.is_set() and names & book.active():
            ended = len(cells) - len(stale(cells, self.folder))
            if ended != told:
                self.say(f"[{ended}/{len(cells)}] runs ended")
                told = ended
            looks_again = time.monotonic() + POLL
            while not self.stopping.is_set() and time.monotonic() < looks_again:
                time.sleep(0.1)


def parameters(options: SlurmOptions, name: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "job_name": name,
        "time": options.time,
        # A quarter of a short limit: most of the time is for training.
        "signal_delay_s": min(WARNING, options.time * 15),
        "partition": options.partition,
        "gpus_per_node": options.gpus,
        "cpus_per_task": options.cpus,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        # submitit's own `mem` takes whole gigabytes only.
        "additional_parameters": None if options.mem is None else {"mem": options.mem},
    }
    return {key: value for key, value in chosen.items() if value is not None}


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if "error" in line.lower()] or lines
    return " ".join(wanted)[:300] or "no message"
