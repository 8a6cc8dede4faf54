"""The pilot of a comparison: the time of a run and the size of its checkpoint, from a few updates of each kind."""

from __future__ import annotations

import heapq
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from fathoms.comparing.folder import Cell
from fathoms.comparing.runner import Worker, task_of
from fathoms.data.sources.splits import Roles
from fathoms.errors import ConfigError
from fathoms.training.job import Job

WARM_UP = 3
"""First updates of a pilot, which are not counted."""
PATIENCE = 5.0
"""Seconds after which a pilot of slow updates ends, though not before the second; else it lasts two epochs."""
LIMIT = 50.0
"""Seconds after which all pilots are ended, so that a dry run takes less than a minute on any machine."""
EVALUATION = 0.4
"""Seconds of a forward pass, as a share of an update."""

KEYS = ("start", "epoch", "bytes", "took")
Pilots = Mapping[str, Mapping[str, float]]
"""By architecture: seconds to start a run, of an epoch, of the pilot and to launch a worker; bytes of a checkpoint."""


def time_updates(job: Job, roles: Roles) -> dict[str, float]:
    """Train for a moment in a folder that is then removed: seconds to start and of an epoch, bytes of a checkpoint."""
    from fathoms.comparing.worker import make_trainer

    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        run = replace(job.run, output=scratch, experiment="pilot", log=None)
        trainer, times = make_trainer(replace(job, run=run), roles), list[float]()
        updates = trainer.context.updates_per_epoch

        def note_time() -> None:
            times.append(time.monotonic())
            late = len(times) > 1 and times[-1] - times[0] > PATIENCE
            if len(times) > 2 * updates or late:
                trainer.loop.stop.code = 143

        trainer.loop.after_update = note_time
        start = time.monotonic() - began
        trainer.run()
        gaps = [after - before for before, after in itertools.pairwise(times)]
        each = statistics.median(gaps[WARM_UP - 1 :] or gaps or [time.monotonic() - began])
        context = trainer.context
        held_out = 0 if context.data.val is None else context.data.val.batches
        epoch = updates * each + held_out * EVALUATION * each / job.run.eval_interval
        if len(times) >= 2 * updates:
            # From the end of one epoch to that of the next, with what a run does between them.
            epoch = max(epoch, times[2 * updates - 1] - times[updates - 1])
        last = Path(scratch) / "pilot" / "checkpoints" / "last"
        size = sum(file.stat().st_size for file in last.iterdir()) if last.is_dir() else 0
        took = time.monotonic() - began
    return {"start": start, "epoch": epoch, "bytes": size, "took": took}


def run_pilot(
    cells: Iterable[Cell], slots: Sequence[dict[str, str]], limit: float | None = None
) -> dict[str, dict[str, float]] | None:
    """The pilot of each architecture on all workers at once, as runs will share the machine.

    None where they take longer than `limit` seconds, or `LIMIT`; one that cannot run is an error.
    """
    found: dict[str, dict[str, float]] = {}
    # A comparison that is only planned has no folder yet.
    with tempfile.TemporaryDirectory() as scratch:
        workers = [Worker(Path(scratch) / f"pilot-{place}.log", slot) for place, slot in enumerate(slots)]
        late = threading.Event()

        def end() -> None:
            late.set()
            for worker in workers:
                worker.process.kill()

        timer = threading.Timer(LIMIT if limit is None else limit, end)
        timer.start()
        pool = ThreadPoolExecutor(len(workers))
        try:
            for cell in cells:
                if cell.architecture in found:
                    continue
                task, began = {**task_of(cell), "pilot": True}, time.monotonic()
                results = list(pool.map(lambda worker, task=task: worker.ask(task), workers))
                if late.is_set():
                    return None
                for worker, result in zip(workers, results, strict=True):
                    why = worker.death() if result is None else result.get("reason")
                    if why:
                        raise ConfigError(
                            f"arm {cell.arm!r}: its pilot failed ({why}); fix it, or use --no-pilot"
                        )
                asked, known = time.monotonic() - began, list(filter(None, results))
                mean = {key: statistics.fmean(result[key] for result in known) for key in KEYS}
                found[cell.architecture] = {**mean, "launch": max(0.0, asked - mean["took"])}
        finally:
            timer.cancel()
            pool.shutdown()
            for worker in workers:
                worker.close()
    return found


def seconds_of(job: Job, pilot: Mapping[str, float]) -> float:
    """Seconds that a run takes."""
    return pilot["start"] + job.recipe.total_epochs * pilot["epoch"]


def makespan(seconds: Iterable[float], workers: int) -> float:
    """Seconds until all runs have ended, each begun in its order on the first worker that is free.

    >>> makespan([3.0, 2.0, 2.0], workers=2)
    4.0
    """
    free = [0.0] * workers
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)
