"""One rank of a run that dies or is stopped on request: KILL=RANK:UPDATE or STOP=RANK:UPDATE, then the words."""

from __future__ import annotations

import os
import signal
import sys

import torch

from fathoms.cli.main import command
from fathoms.train.loop import Trainer

torch.set_num_threads(1)
update = Trainer._update


def place(name):
    rank, _, number = os.environ.get(name, "-1:0").partition(":")
    return int(rank), int(number)


def counted(trainer, batch):
    here = (trainer.world.rank, trainer.course.updates)
    if here == place("KILL") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if here == place("STOP"):
        os.kill(os.getpid(), signal.SIGTERM)
    update(trainer, batch)


Trainer._update = counted
sys.argv[1:1] = ["train"]
command()
