"""A worker process of a comparison: trains the cells it is given, one after the other, as `fathoms train` does.

Cells come as lines of JSON on standard input, results leave as lines on standard output. Everything else that is
printed goes to standard error, which the parent keeps in a log.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import select
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fathoms.compare.cells import job_from_json
from fathoms.errors import ConfigError, FathomsError
from fathoms.files.untrusted import read_json
from fathoms.train.job import Job

if TYPE_CHECKING:
    from fathoms.compare.workers.resident import ResidentData
    from fathoms.data.sources.splits import Roles
    from fathoms.train.trainer import Trainer

PARENT_POLL = 1.0
"""Seconds between looks at whether the parent is still there."""
LOCK_WAIT = 30.0
"""Seconds to wait for a run folder that the worker of a killed comparison still holds."""
GROWTH = 1 << 30
"""Bytes that a worker may grow beyond twice its first cell's memory before it is renewed."""


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


def make_trainer(job: Job, roles: Roles | None = None) -> Trainer:
    """The trainer of a cell; a checkpoint made where the same data had another path is accepted."""
    import torch

    from fathoms.train.build import open_data
    from fathoms.train.distributed import World, choose_device
    from fathoms.train.trainer import Trainer

    roles = roles or open_data(job)
    if moved(job, roles):
        job = replace(job, run=replace(job.run, allow_change=("data",)))
    device = choose_device(job.run.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(job, World(0, 1, device), show=False, roles=roles)
    if trainer.learner.speed.compiles:
        # Beyond its limit the compiler would fall back to eager code in silence.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    return trainer


def moved(job: Job, roles: Roles) -> bool:
    """Whether the newest checkpoint is of the same data under another path."""
    from fathoms.train.checkpoint import folder as checkpoints

    newest = checkpoints.newest(job.folder / "checkpoints")
    state = {} if newest is None else read_json(newest / "state.json", ConfigError)
    there = state.get("identity", {}).get("data")
    return there != job.identity()["data"] and roles.has_fingerprint(state.get("data"))


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


def train(job: Job, roles: Roles) -> dict[str, Any]:
    """Train one cell to its end: its status, and why it diverged."""
    wait_until_free(job.folder)
    summary = make_trainer(job, roles).run().summary
    return {"status": summary["status"], "reason": summary["reason"]}


def answer(task: dict[str, Any], data: ResidentData) -> dict[str, Any]:
    """The result of a task, which is a cell or its pilot; its reason where it fails."""
    try:
        job = job_from_json(task["job"])
        roles = data.roles(job, task["fingerprint"], task["test"])
        if "pilot" in task:
            from fathoms.compare.workers.pilot import time_updates

            return time_updates(job, roles, task["pilot"])
        return train(job, roles)
    except FathomsError as error:
        return {"status": "failed", "reason": str(error)}
    except Exception as error:  # noqa: BLE001
        # A CUDA error outlives the call that caused it, and others may: this process cannot be trusted any more.
        traceback.print_exc()
        return {"status": "failed", "reason": reason_of(error), "broken": True}


def resident() -> int:
    """Bytes of memory that this process holds, on the host and on its GPU."""
    import torch

    on_device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    try:
        return on_device + int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return on_device


def main() -> int:
    """Serve until standard input ends."""
    channel = own_stdout()
    threading.Thread(target=watch_parent, args=(os.getppid(),), daemon=True).start()
    from fathoms.compare.workers.resident import ResidentData

    architecture, first, data = None, 0, ResidentData()
    for line in sys.stdin:
        task = json.loads(line)
        began = time.monotonic()
        if architecture not in (None, task["architecture"]):
            forget_compiled()
        architecture = task["architecture"]
        result = answer(task, data)
        gc.collect()
        first = first or resident()
        result |= {"wall_seconds": time.monotonic() - began, "grown": resident() > 2 * first + GROWTH}
        channel.write(json.dumps(result) + "\n")
        channel.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
