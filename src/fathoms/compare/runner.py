"""The runner of a comparison: worker processes that train cells, and what is done when one of them dies.

Imports neither torch nor scipy, so that a comparison starts at once and its parent holds no GPU memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fathoms.compare.cells import Cell, job_to_json

CELLS_PER_WORKER = 50
"""A worker is renewed after so many cells, so that nothing can pile up in it."""
GRACE = 60.0
"""Seconds that a worker has to save after a signal."""


@runtime_checkable
class Listener(Protocol):
    """Told when cells begin and end."""

    def began(self, cell: Cell) -> None:
        """A cell starts, or resumes."""

    def ended(self, cell: Cell, result: dict[str, Any]) -> None:
        """A cell ended, was interrupted, or failed."""


class Worker:
    """One worker process and the pipe to it."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self._file = log.open("ab")
        command = [sys.executable, "-m", "fathoms.compare.worker"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env=environment,
            # Ctrl-C reaches the parent, which passes it on once.
            start_new_session=True,
        )
        self.done = 0

    def train(self, cell: Cell) -> dict[str, Any] | None:
        """The result of one cell; None if the process died."""
        task = {"job": job_to_json(cell.job), "architecture": cell.architecture}
        try:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        self.done += 1
        return json.loads(line) if line.endswith(b"\n") else None

    def death(self) -> str:
        """Why the process died: its signal or code, and the last line it printed."""
        code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = self.log.read_bytes()[-4000:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its worker died ({how}){': ' + last[:300] if last else ''}"

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Ask for a checkpoint and an end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(sig)

    def close(self) -> None:
        """End the process: it has nothing to do."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._file.close()


@dataclass
class Runner:
    """Runs cells on workers.

    Args:
        slots: One environment for each worker that may run at a time; what differs is the GPU they see.
        logs: Folder of the workers' logs.
        listener: Told of every cell.
        seconds: Most seconds to run; None without a limit.
    """

    slots: Sequence[dict[str, str]]
    logs: Path
    listener: Listener
    seconds: float | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    _workers: dict[int, Worker] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, cells: Iterable[Cell]) -> None:
        """Train all cells; those whose worker died once more at the end, alone."""
        self.logs.mkdir(parents=True, exist_ok=True)
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        died: list[Cell] = []
        clock = threading.Timer(self.seconds, self.stop) if self.seconds is not None else None
        if clock is not None:
            clock.daemon = True
            clock.start()
        try:
            threads = [
                threading.Thread(target=self._serve, args=(slot, waiting, died), daemon=True)
                for slot in range(len(self.slots))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                # In pieces, so that a signal's handler runs.
                while thread.is_alive():
                    thread.join(0.2)
            self._run_alone(died)
        finally:
            if clock is not None:
                clock.cancel()

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Start no further cell, and ask those under way to save and end."""
        self.stopping.set()
        with self._lock:
            for worker in self._workers.values():
                worker.stop(sig)

    def _serve(self, slot: int, waiting: queue.SimpleQueue[Cell], died: list[Cell]) -> None:
        """One worker after the other in a slot, until no cell is left."""
        worker: Worker | None = None
        while not self.stopping.is_set():
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or self._start(slot)
            self.listener.began(cell)
            result = worker.train(cell)
            if result is None:
                # Which of the runs at that time was at fault is not known: each of the dead is tried alone.
                self._end(slot, worker)
                worker = None
                if not self.stopping.is_set():
                    died.append(cell)
                continue
            if result.get("renew") and len(self.slots) > 1:
                # Others share the memory: alone it may fit.
                died.append(cell)
            else:
                self.listener.ended(cell, result)
            if result.get("renew") or worker.done >= CELLS_PER_WORKER:
                self._end(slot, worker)
                worker = None
        if worker is not None:
            self._end(slot, worker)

    def _run_alone(self, cells: Sequence[Cell]) -> None:
        """Cells whose worker died, each in a new one with no other beside it."""
        for cell in cells:
            if self.stopping.is_set():
                return
            worker = self._start(0)
            self.listener.began(cell)
            result = worker.train(cell)
            if result is None and not self.stopping.is_set():
                result = {"status": "failed", "reason": worker.death()}
            self._end(0, worker)
            if result is not None:
                self.listener.ended(cell, result)

    def _start(self, slot: int) -> Worker:
        worker = Worker(self.logs / f"worker-{slot}.log", self.slots[slot])
        with self._lock:
            self._workers[slot] = worker
            if self.stopping.is_set():
                worker.stop()
        return worker

    def _end(self, slot: int, worker: Worker) -> None:
        with self._lock:
            self._workers.pop(slot, None)
        worker.close()


def make_slots(jobs: int, gpus: int, per_gpu: int) -> list[dict[str, str]]:
    """The environments of the workers: one per GPU (or `per_gpu`), else groups of cores.

    Args:
        jobs: Workers on a CPU; 0 takes one for two cores.
        gpus: GPUs of this machine; 0 runs on the CPU.
        per_gpu: Workers that share a GPU.
    """
    if gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        return [{**os.environ, "CUDA_VISIBLE_DEVICES": gpu} for gpu in shown[:gpus] for _ in range(per_gpu)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or max(1, cores // 2), cores)
    threads = str(max(1, cores // jobs))
    quiet = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return [{**os.environ, **quiet} for _ in range(jobs)]


def order(cells: Iterable[Cell]) -> list[Cell]:
    """Cells in the order of work: compiled ones by architecture, which is then compiled once; others by seed."""
    listed = list(cells)
    if any(cell.job.recipe.torchcompile is not None for cell in listed):
        return sorted(listed, key=lambda cell: (cell.architecture, cell.seed))
    return sorted(listed, key=lambda cell: cell.seed)
