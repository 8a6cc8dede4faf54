"""A worker process of a comparison: trains the cells it is given, one after the other, as `fathoms train` does.

Cells come as lines of JSON on standard input, results leave as lines on standard output. Everything else that is
printed goes to standard error, which the parent keeps in a log.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from typing import Any, TextIO

from fathoms.compare.cells import job_from_json
from fathoms.errors import FathomsError

PARENT_POLL = 1.0
"""Seconds between looks at whether the parent is still there."""


def watch_parent(parent: int) -> None:
    """End this process once its parent is gone, as a kill would: the run resumes from its checkpoint."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL)
    os._exit(1)


def own_stdout() -> TextIO:
    """The pipe to the parent; what others print to standard output goes to standard error from now on."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def forget_compiled() -> None:
    """Reset compiler and allocator, so that a new architecture starts as in a new process."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train one cell to its end: its status, and why it failed where it did."""
    import torch

    from fathoms.train.distributed import World, choose_device
    from fathoms.train.loop import Trainer

    job = job_from_json(task["job"])
    device = choose_device(job.run.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        outcome = Trainer(job, World(0, 1, device), show=False).run()
    except FathomsError as error:
        return {"status": "failed", "reason": str(error)}
    except torch.OutOfMemoryError as error:
        return {
            "status": "failed",
            "reason": f"out of memory: {' '.join(str(error).split())[:300]}",
            "renew": True,
        }
    except torch.AcceleratorError as error:
        # A CUDA error outlives the call that caused it: this process cannot be trusted any more.
        return {"status": "failed", "reason": f"{' '.join(str(error).split())[:300]}", "renew": True}
    return {"status": outcome.summary["status"], "reason": outcome.summary["reason"]}


def main() -> int:
    """Serve until standard input ends."""
    channel = own_stdout()
    threading.Thread(target=watch_parent, args=(os.getppid(),), daemon=True).start()
    architecture = None
    for line in sys.stdin:
        task = json.loads(line)
        began = time.monotonic()
        if architecture not in (None, task["architecture"]):
            forget_compiled()
        architecture = task["architecture"]
        result = train(task)
        result["wall_seconds"] = time.monotonic() - began
        channel.write(json.dumps(result) + "\n")
        channel.flush()
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
