"""One rank of `fathoms train` that dies, is stopped or saves slowly on request; its arguments are those of the run.

KILL=RANK:UPDATE; STOP=RANK:UPDATE,...; SLOW_SAVE=SECONDS, and then no signal counts as an echo. PRETEND_GRAPH=1 runs
what would be captured, on a CPU that passes for a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from fathoms.cli.main import command
from fathoms.train.checkpoint import folder as checkpoints
from fathoms.train.loop import Loop
from fathoms.train.precision import cuda_graph, machine
from fathoms.train.precision.speed import Machine
from fathoms.train.signals import LAUNCHED

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
if "PRETEND_GRAPH" in os.environ:
    machine.machine_of = lambda world: Machine("cuda", "pretended", (9, 0), "no compiler", world.size)
    cuda_graph.GraphedStep = lambda compute, _parameters, **_options: compute
sys.argv[1:1] = ["train"]
command()
