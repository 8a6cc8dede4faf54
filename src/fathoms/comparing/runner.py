"""The runner of a comparison: worker processes that train cells, why one of them died, and signals that stop them.

Imports neither torch nor scipy, so that a comparison starts at once and its parent holds no GPU memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from fathoms.comparing.folder import Cell, job_to_json
from fathoms.files import open_own
from fathoms.machine import openmp_settings, usable_cores

GRACE = 120.0
"""Seconds that a worker has to save after a signal."""
POLL = 0.5
"""Seconds between looks at whether a silent worker is still there."""

# What names a cause, the plainest first: the first line with one of the first kind, or else of the next.
CAUSES = (
    r"out of memory|\b(CUDA|cuDNN|NCCL|HIP) (driver )?error|device-side assert",
    r"Fatal Python error|Segmentation fault|Bus error|Illegal instruction|Assertion .*failed",
    r"^\S*(Error|Exception): ",
)
# Lines of a stack, and torch's advice below an error.
NOISE = re.compile(
    r"frame #|File \"|Traceback|Thread 0x|Current thread|Extension modules|#\d+ |Exception raised from|[~^ ]+$"
    r"|CUDA kernel errors might|For debugging consider|Compile with|Device-side assertion tracking|<no Python frame"
)


def cause_in(printed: str) -> str:
    r"""The line of a dead process that names the cause; else the last that is not part of a stack; else nothing.

    >>> cause_in("RuntimeError: seen\n what():  CUDA error: device-side assert triggered\nframe #28: _start + 0x25")
    'CUDA error: device-side assert triggered'
    """
    lines = [line.strip().removeprefix("what():").strip() for line in printed.splitlines()]
    lines = [line for line in lines if line and not NOISE.match(line)]
    for cause in CAUSES:
        if found := next((line for line in lines if re.search(cause, line)), None):
            return found
    return lines[-1] if lines else ""


class Worker:
    """One worker process.

    Args:
        log: File that gets what it prints, at its end.
        environment: Its environment.
    """

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.log, self.done = log, 0
        self._file = open_own(log, "ab")
        self._begin = self._file.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fathoms.comparing.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env=environment,
            # Ctrl-C reaches the parent, which passes it on once.
            start_new_session=True,
        )

    def ask(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """The result of one task; None if the process died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._line()
        self.done += 1
        return json.loads(line) if line.endswith(b"\n") else None

    def _line(self) -> bytes:
        """The next line of the pipe; empty once the process is dead, even if one that it forked holds the pipe."""
        pipe = self.process.stdout
        assert pipe is not None
        while True:
            dead = self.process.poll() is not None
            if select.select([pipe], [], [], 0 if dead else POLL)[0]:
                return pipe.readline()
            if dead:
                return b""

    def death(self) -> str:
        """Why the process died: its signal or code, and the line that names the cause."""
        code = self.process.wait(GRACE)
        how = f"exit code {code}"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            how += ", possibly out of memory" if -code == signal.SIGKILL else ""
        cause = cause_in(self.log.read_bytes()[self._begin :].decode(errors="replace"))
        return f"its worker died ({how}){': ' + cause[:300] if cause else ''}"

    def signal(self, number: int) -> None:
        """Send a signal; SIGTERM asks for a checkpoint and an end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        """End the process, which has nothing to do."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._file.close()


HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@runtime_checkable
class Stoppable(Protocol):
    """Work that a signal stops."""

    def stop(self) -> None:
        """Start nothing further; what is under way saves and ends."""

    def kill(self) -> None:
        """End everything at once."""


class PassSignals:
    """Pass SIGINT, SIGTERM and SIGHUP on to the workers; gives the list of those that came.

    One that is ignored from the start, as `nohup` does with SIGHUP, stays ignored.
    """

    def __init__(self, runner: Stoppable) -> None:
        self.runner, self.came = runner, list[int]()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> list[int]:
        if threading.current_thread() is threading.main_thread():
            for number in HEARD:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self.came

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        if len(self.came) > 1:
            self.runner.kill()
            os._exit(128 + number)
        self.runner.stop()


CELLS_PER_WORKER = 50
"""A worker is renewed after this many cells, so that nothing can pile up in it."""


@runtime_checkable
class Listener(Protocol):
    """Notified when cells begin and end, from several threads."""

    def began(self, cell: Cell) -> None:
        """A cell starts, or resumes."""

    def ended(self, cell: Cell, result: dict[str, Any]) -> None:
        """A cell ended, was interrupted, or failed."""


@dataclass
class Runner:
    """Runs cells on workers.

    Args:
        slots: One environment for each worker that may run at a time; what differs is the GPU they see.
        logs: Folder of the workers' logs.
        listener: Notified of every cell.
        deadline: When to stop, by the monotonic clock; None without a limit.
    """

    slots: Sequence[dict[str, str]]
    logs: Path
    listener: Listener
    deadline: float | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    _workers: dict[int, Worker] = field(default_factory=dict)
    # Reentrant: the handler of a signal runs in the main thread, which may hold it.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _errors: list[BaseException] = field(default_factory=list)
    _results: queue.SimpleQueue[tuple[Cell, dict[str, Any]] | None] = field(default_factory=queue.SimpleQueue)

    def run(self, cells: Iterable[Cell]) -> None:
        """Train all cells; those whose worker died once more at the end, alone."""
        self.logs.mkdir(parents=True, exist_ok=True)
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        died: list[Cell] = []
        clock = self._clock()
        # Apart from the workers, which need not wait until results are gathered and judged.
        listening = threading.Thread(target=self._listen, daemon=True)
        listening.start()
        try:
            threads = [
                threading.Thread(target=self._serve, args=(slot, waiting, died), daemon=True)
                for slot in range(min(len(self.slots), waiting.qsize()))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                # In pieces, so that a signal's handler runs.
                while thread.is_alive():
                    thread.join(0.2)
            if not self._errors:
                self._run_alone(died)
        finally:
            self._results.put(None)
            listening.join()
            if clock is not None:
                clock.cancel()
        if self._errors:
            raise self._errors[0]

    def _listen(self) -> None:
        """Pass results on to the listener, in their order; an error there ends the comparison."""
        while (item := self._results.get()) is not None:
            try:
                self.listener.ended(*item)
            except BaseException as error:  # noqa: BLE001
                # Such as a disk that takes no more: it is raised again in the main thread.
                self._errors.append(error)
                self.stop()

    def _clock(self) -> threading.Timer | None:
        if self.deadline is None:
            return None
        clock = threading.Timer(max(0.0, self.deadline - time.monotonic()), self.stop)
        clock.daemon = True
        clock.start()
        return clock

    def stop(self) -> None:
        """Start no further cell, and ask those under way to save and end; one that does not is killed."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        with self._lock:
            for worker in self._workers.values():
                worker.signal(signal.SIGTERM)
        late = threading.Timer(GRACE, self.kill)
        late.daemon = True
        late.start()

    def kill(self) -> None:
        """End all workers at once; their cells resume from the last checkpoint."""
        self.stopping.set()
        with self._lock:
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)

    def _serve(self, slot: int, waiting: queue.SimpleQueue[Cell], died: list[Cell]) -> None:
        """One worker after the other in a slot, until no cell is left; an error here ends the comparison."""
        worker: Worker | None = None
        try:
            while not self.stopping.is_set():
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    break
                worker = worker or self._start(slot)
                self.listener.began(cell)
                if not self._train(worker, cell, died):
                    self._end(slot, worker)
                    worker = None
        except BaseException as error:  # noqa: BLE001
            # Such as a process that cannot be started: it is raised again in the main thread.
            self._errors.append(error)
            self.stop()
        finally:
            if worker is not None:
                self._end(slot, worker)

    def _train(self, worker: Worker, cell: Cell, died: list[Cell]) -> bool:
        """Train a cell; whether the worker may train another."""
        result = worker.ask(task_of(cell))
        if result is None:
            # Which of the runs at that time was at fault is not known: each of the dead is tried alone.
            if not self.stopping.is_set():
                died.append(cell)
            return False
        was_alone = len(self.slots) == 1 and worker.done == 1
        if result.get("broken") and not was_alone:
            # Others share the memory, and earlier cells may have left something: alone it may fit.
            died.append(cell)
        else:
            self._results.put((cell, result))
        return not (result.get("broken") or worker.done >= CELLS_PER_WORKER)

    def _run_alone(self, cells: Sequence[Cell]) -> None:
        """Cells whose worker died, each in a new one while no other runs."""
        for cell in cells:
            if self.stopping.is_set():
                return
            worker = self._start(0)
            try:
                self.listener.began(cell)
                result = worker.ask(task_of(cell))
                if result is None and not self.stopping.is_set():
                    result = {"status": "failed", "reason": worker.death()}
            finally:
                self._end(0, worker)
            if result is not None:
                self._results.put((cell, result))

    def _start(self, slot: int) -> Worker:
        with self._lock:
            worker = Worker(self.logs / f"worker-{slot}.log", self.slots[slot])
            self._workers[slot] = worker
            if self.stopping.is_set():
                worker.signal(signal.SIGTERM)
        return worker

    def _end(self, slot: int, worker: Worker) -> None:
        worker.close()
        with self._lock:
            self._workers.pop(slot, None)


def task_of(cell: Cell) -> dict[str, Any]:
    return {
        "job": job_to_json(cell.job),
        "architecture": cell.architecture,
        "fingerprint": cell.fingerprint,
        "test": cell.test,
    }


def make_slots(jobs: int, gpus: Sequence[str], per_gpu: int) -> list[dict[str, str]]:
    """The environments of the workers: one per GPU (or `per_gpu`), else groups of cores.

    Args:
        jobs: Workers on a CPU; 0 takes one for two cores.
        gpus: GPUs that workers may see, as `visible_gpus` has them; none runs on the CPU.
        per_gpu: Workers that share a GPU.
    """
    if gpus:
        return [{**os.environ, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus for _ in range(per_gpu)]
    cores = usable_cores()
    jobs = min(jobs or max(1, cores // 2), cores)
    return [{**os.environ, **openmp_settings(os.environ, jobs)} for _ in range(jobs)]


def order(cells: Iterable[Cell], gpus: int = 0) -> list[Cell]:
    """Cells in the order of work: compiled ones by architecture, which is then compiled once; others by seed."""
    listed = list(cells)
    # Whether `auto` compiles is known to the workers alone; on a CPU it never does.
    plain = {"none"} if gpus else {"none", "auto"}
    if any(cell.job.recipe.torchcompile not in plain for cell in listed):
        return sorted(listed, key=lambda cell: (cell.architecture, cell.seed))
    return sorted(listed, key=lambda cell: cell.seed)
