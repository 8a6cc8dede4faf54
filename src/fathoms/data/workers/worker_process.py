"""The loop of a decoding process: receive a task, run it, send the result."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from fathoms.data.crop.pixel_buffer import Allocate
from fathoms.data.errors import LoaderError
from fathoms.data.workers.process_handle import ProcessStatus
from fathoms.data.workers.shared_memory import Arena
from fathoms.data.workers.threads import lower_priority
from fathoms.data.workers.watch import task_error
from fathoms.errors import FathomsError

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that a scheduler sends to all processes of a job; the training loop handles them."""


def serve(
    work: Callable[[Any, ProcessStatus, Allocate], Any],
    status: ProcessStatus,
    pipe: Connection,
    arena: Arena,
    parent: int,
) -> NoReturn:
    """Run tasks until the parent is gone, then exit without running any of the parent's clean-up."""
    try:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        # The parent's tensors on a GPU must not be freed here.
        gc.freeze()
        # The parent's other threads do not exist here, among them those that torch would wait for.
        torch.set_num_threads(1)
        lower_priority()
        while True:
            while not pipe.poll(1.0):
                if os.getppid() != parent:
                    os._exit(0)
            number, task, slot = pipe.recv()
            status.begin("")
            try:
                message = (number, work(task, status, arena.allocator(slot)), None)
            except FathomsError as failure:
                message = (number, None, _picklable(failure))
            # Whatever ends a task must reach the consumer, or it would wait for ever.
            except Exception as failure:  # noqa: BLE001
                message = (number, None, task_error(status.name, status.item, failure))
            status.begin("")
            pipe.send(message)
    finally:
        os._exit(0)


def _picklable(error: FathomsError) -> FathomsError:
    """The error, or its message in another if it cannot be pickled and rebuilt."""
    try:
        pickle.loads(pickle.dumps(error))
    # Pickling runs the error's own code, which may raise anything.
    except Exception:  # noqa: BLE001
        return LoaderError(str(error))
    return error
