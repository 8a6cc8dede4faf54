"""A worker process of a comparison: trains the cells it is given, one after the other, as `fathoms train` does.

Cells come as lines of JSON on standard input, results leave as lines on standard output. Everything else that is
printed goes to standard error, which the parent keeps in a log.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import os
import select
import statistics
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fathoms.comparing.folder import job_from_json
from fathoms.data.sources.splits import Roles, open_roles
from fathoms.errors import ConfigError, FathomsError
from fathoms.training.job import Job
from fathoms.untrusted import read_json


class ResidentData:
    """The splits of the data set that the last cell used.

    A loader keeps a source's pixels on its device for as long as the source lives, so that the next cell finds them
    there. Nothing of a run is kept: order, crops and augmentation follow from its seed.
    """

    def __init__(self) -> None:
        self._key: tuple[str | None, float | None] | None = None
        self._roles: Roles | None = None
        self._fingerprints: set[str] = set()
        """Those that were found to be of these data."""

    def roles(self, job: Job, fingerprint: str, test: bool = True) -> Roles:
        """The data of a cell by its roles.

        Args:
            job: The cell's run.
            fingerprint: Of the data that the comparison was planned with; other data are an error.
            test: Whether the test set is among them. Trials of tuning never see it.
        """
        key = (job.data, job.recipe.val_share)
        if self._roles is None or key != self._key:
            # The old data go before the new ones come.
            self._roles = None
            self._roles, self._key = open_roles(job.data, job.recipe.val_share), key
            self._fingerprints = set()
        roles = self._roles
        if fingerprint not in self._fingerprints and fingerprint != roles.fingerprint():
            raise ConfigError(
                f"{job.data}: the data changed since the comparison was planned; bring them back, or start another"
            )
        self._fingerprints.add(fingerprint)
        return roles if test else roles._replace(test=None)


if TYPE_CHECKING:
    from torch import nn

    from fathoms.training.run import Trainer

PARENT_POLL = 1.0
"""Seconds between looks at whether the parent is still there."""
WARM_UP = 3
"""First updates of a pilot, which are not counted."""
PATIENCE = 5.0
"""Seconds after which a pilot of slow updates ends, though not before the second; else it lasts two epochs."""
EVALUATION = 0.4
"""Seconds of a forward pass, as a share of an update."""
LOCK_WAIT = 30.0
"""Seconds to wait for a run folder that the worker of a killed comparison still holds."""


def watch_parent(parent: int, stdin: bool = True) -> None:
    """End this process once its parent is gone, as a kill would: the run resumes from its checkpoint.

    Args:
        parent: The parent's id.
        stdin: Whether standard input is a pipe from the parent, whose hang-up is reported at once.
    """
    pipe = select.poll()
    if stdin:
        pipe.register(0, select.POLLHUP)
    while os.getppid() == parent and not pipe.poll(1000 * PARENT_POLL):
        pass
    os._exit(1)


def own_stdout() -> TextIO:
    """The pipe to the parent; what others print to standard output goes to standard error from now on."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def forget_compiled() -> None:
    """Reset compiler and allocator, so that a new architecture starts as in a new process."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_trainer(job: Job, roles: Roles | None = None, module: nn.Module | None = None) -> Trainer:
    """The trainer of a cell; a checkpoint made where the same data had another path is accepted."""
    import torch

    from fathoms.training.build import open_data
    from fathoms.training.distributed import World, choose_device
    from fathoms.training.run import Trainer

    roles = roles or open_data(job)
    if moved(job, roles):
        job = replace(job, run=replace(job.run, allow_change=("data",)))
    device = choose_device(job.run.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(job, World(0, 1, device), show=False, roles=roles, module=module)
    if trainer.learner.speed.compiles:
        # Beyond its limit the compiler would fall back to eager code in silence.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    return trainer


def moved(job: Job, roles: Roles) -> bool:
    """Whether the newest checkpoint is of the same data under another path."""
    from fathoms.training import checkpoint_files as checkpoints

    newest = checkpoints.newest(job.folder / "checkpoints")
    state = {} if newest is None else read_json(newest / "state.json", ConfigError)
    there = state.get("identity", {}).get("data")
    return there != job.identity()["data"] and state.get("data") == roles.fingerprint()


def wait_until_free(folder: Path) -> None:
    """Wait for the lock of a run folder, which a worker that is about to end may still hold."""
    deadline = time.monotonic() + LOCK_WAIT
    while (folder / ".lock").is_file() and time.monotonic() < deadline:
        with (folder / ".lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.2)
            else:
                return


def reason_of(error: Exception) -> str:
    """Why a cell failed, on one line."""
    import torch

    text = " ".join(str(error).split())[:300]
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in text
    return f"out of memory: {text}" if memory else f"{type(error).__name__}: {text}"


def train(job: Job, roles: Roles, module: nn.Module | None = None) -> dict[str, Any]:
    """Train one cell to its end: its status, and why it diverged."""
    wait_until_free(job.folder)
    summary = make_trainer(job, roles, module).run().summary
    return {"status": summary["status"], "reason": summary["reason"]}


def time_updates(job: Job, roles: Roles) -> dict[str, float]:
    """Train for a moment in a folder that is then removed: seconds to start and of an epoch, bytes of a checkpoint."""
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


def answer(task: dict[str, Any], data: ResidentData) -> dict[str, Any]:
    """The result of a task, which is a cell or its pilot; its reason where it fails."""
    try:
        job = job_from_json(task["job"])
        roles = data.roles(job, task["fingerprint"], task["test"])
        if "pilot" in task:
            return dict(time_updates(job, roles))
        return train(job, roles)
    except FathomsError as error:
        return {"status": "failed", "reason": str(error)}
    except Exception as error:  # noqa: BLE001
        # A CUDA error outlives the call that caused it, and others may: this process cannot be trusted any more.
        traceback.print_exc()
        return {"status": "failed", "reason": reason_of(error), "broken": True}


def main() -> int:
    """Serve until standard input ends."""
    channel = own_stdout()
    threading.Thread(target=watch_parent, args=(os.getppid(),), daemon=True).start()
    architecture, data = None, ResidentData()
    for line in sys.stdin:
        task = json.loads(line)
        began = time.monotonic()
        if architecture not in (None, task["architecture"]):
            forget_compiled()
        architecture = task["architecture"]
        result = answer(task, data)
        gc.collect()
        channel.write(json.dumps({**result, "wall_seconds": time.monotonic() - began}) + "\n")
        channel.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
