"""Start a run faster: decode its data during the imports, and collect no garbage meanwhile.

Importing this file does not import torch.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fathoms.errors import ConfigError

if TYPE_CHECKING:
    from fathoms.data.sources.splits import Roles
    from fathoms.train.distributed import World
    from fathoms.train.job import Job


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection inside, and later ones pass over what was made here.

    Imports make objects that stay as long as the process; searching them again and again took a fifth of the start.
    """
    was_on = gc.isenabled()
    # What an earlier run of this process has left is not kept.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # An interpreter that ends as usual must find everything, or Triton's bindings report leaks.
        atexit.register(gc.unfreeze)
        if was_on:
            gc.enable()


def open_meanwhile(job: Job) -> Callable[[], Roles | None]:
    """Begin to decode data that is one file in a thread, and hash it; the result waits, and gives None for other data.

    Unpacking and hashing release the interpreter. Folders and data sets of the Hub would not, and import more.
    """
    if job.data is None or not Path(job.data).is_file():
        return lambda: None
    from fathoms.train.build import open_data

    def opened() -> Roles:
        roles = open_data(job)
        roles.fingerprint()
        return roles

    pool = ThreadPoolExecutor(1, "data")
    future = pool.submit(opened)
    pool.shutdown(wait=False)
    return future.result


def import_compiler_for(job: Job, world: World) -> None:
    """Import torch's compiler if this job, were it long enough, would be compiled; its length follows from the data."""
    from fathoms.train.precision.compile import prepare_compiler
    from fathoms.train.precision.machine import machine_of
    from fathoms.train.precision.speed import choose

    # What cannot work is refused where the run is built, which also knows what a run that resumes has recorded.
    with suppress(ConfigError):
        if choose(job, machine_of(world), batches=sys.maxsize).speed.compiles:
            prepare_compiler()
