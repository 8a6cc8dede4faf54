"""One rank of `fathoms train` that dies, is stopped or saves slowly on request; its arguments are those of the run.

KILL=RANK:UPDATE; STOP=RANK:UPDATE,...; SLOW_SAVE=SECONDS, and then no signal counts as an echo.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from fathoms.cli.main import command
from fathoms.training import checkpoint_files as checkpoints
from fathoms.training.distributed import LAUNCHED
from fathoms.training.run import Loop

torch.set_num_threads(1)
update, save = Loop.update, checkpoints.save


def counted(loop, batch):
    here = f"{loop.context.world.rank}:{loop.state.updates}"
    if here == os.environ.get("KILL") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if here in os.environ.get("STOP", "").split(","):
        os.kill(os.getpid(), signal.SIGTERM)
    update(loop, batch)


def slowly(*args):
    time.sleep(float(os.environ["SLOW_SAVE"]))
    save(*args)


Loop.update = counted
if "SLOW_SAVE" in os.environ:
    os.environ.pop(LAUNCHED, None)
    checkpoints.save = slowly
sys.argv[1:1] = ["train"]
command()
