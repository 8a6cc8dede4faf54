"""A pilot: a few timed updates of each architecture in a worker, for the time and disk that a plan will take."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fathoms.compare.cells import Cell
from fathoms.compare.workers.process import Worker
from fathoms.compare.workers.runner import task_of
from fathoms.data.sources.splits import Roles
from fathoms.errors import ConfigError
from fathoms.train.job import Job

UPDATES = 8
"""Updates of a pilot; the first ones warm up and are not counted."""
WARM_UP = 3
PATIENCE = 10.0
"""Seconds after which a pilot of slow updates ends, though not before the second."""
EVALUATION = 0.4
"""Seconds of a forward pass, as a share of an update."""


def time_updates(job: Job, roles: Roles, updates: int) -> dict[str, Any]:
    """Train a few updates in a folder that is then removed: seconds to start and of an epoch, bytes of a checkpoint."""
    from fathoms.compare.workers.worker import make_trainer

    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        run = replace(job.run, output=scratch, experiment="pilot", log=None, probe_interval=0)
        trainer, times = make_trainer(replace(job, run=run), roles), list[float]()

        def note_time() -> None:
            times.append(time.monotonic())
            late = len(times) > 1 and times[-1] - times[0] > PATIENCE
            if len(times) >= updates or late:
                trainer.loop.stop.code = 143

        trainer.loop.after_update = note_time
        start = time.monotonic() - began
        trainer.run()
        gaps = [after - before for before, after in itertools.pairwise(times)]
        each = statistics.median(gaps[WARM_UP - 1 :] or gaps or [time.monotonic() - began])
        context = trainer.context
        held_out = 0 if context.data.val is None else context.data.val.batches
        evaluation = held_out * EVALUATION * each / job.run.eval_interval
        epoch = context.updates_per_epoch * each + evaluation
        last = Path(scratch) / "pilot" / "checkpoints" / "last"
        size = sum(file.stat().st_size for file in last.iterdir()) if last.is_dir() else 0
    return {"start": start, "epoch": epoch, "bytes": size}


def run_pilot(cells: Sequence[Cell], slot: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The pilot of each architecture; one that cannot run is an error."""
    found: dict[str, dict[str, Any]] = {}
    # A comparison that is only planned has no folder yet.
    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(Path(scratch) / "pilot.log", slot)
        try:
            for cell in cells:
                if cell.architecture not in found:
                    result = worker.ask({**task_of(cell), "pilot": UPDATES})
                    why = worker.death() if result is None else result.get("reason")
                    if result is None or why:
                        raise ConfigError(
                            f"arm {cell.arm!r}: its pilot failed ({why}); fix it, or use --no-pilot"
                        )
                    found[cell.architecture] = result
        finally:
            worker.close()
    return found


def expected(cells: Sequence[Cell], pilots: Mapping[str, Mapping[str, Any]], slots: int) -> tuple[float, int]:
    """Seconds that cells take on this number of workers, and bytes of one checkpoint of each."""
    seconds, size = 0.0, 0
    for cell in cells:
        pilot = pilots[cell.architecture]
        seconds += pilot["start"] + cell.job.recipe.total_epochs * pilot["epoch"]
        size += pilot["bytes"]
    return seconds / min(slots, max(1, len(cells))), size
