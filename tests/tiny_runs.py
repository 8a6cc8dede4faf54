"""Tiny training runs: build, run, kill, damage and compare them. Used through the fixtures of tests/conftest.py."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse
from fathoms.training.distributed import World
from fathoms.training.run import Trainer

ON_IMAGES = [
    *("--recipe", "digits", "--depth", "4", "--dim", "32", "--heads", "2"),
    *("--image-size", "16", "--patch-size", "4", "--epochs", "2", "--batch-size", "32", "--device", "cpu"),
]
"""256 images of 16 pixels: 8 updates an epoch of four blocks of 32 channels."""
ON_DIGITS = [
    *("--depth", "2", "--dim", "16", "--heads", "2"),
    *("--epochs", "2", "--batch-size", "96", "--device", "cpu"),
]
"""The embedded digits: 14 updates an epoch of two blocks of 16 channels."""
MARK = 12345.0


class Killed(BaseException):
    """Stands for a kill: nothing of the run gets a chance to clean up."""


class TinyRuns:
    """Runs under one folder, by name.

    Args:
        root: The folder.
        flags: Flags of every run; those of a single run override them.
        data: The data set; None for the embedded digits.
    """

    def __init__(self, root, flags, data=None):
        self.root, self.flags, self.data = root, flags, data

    def words(self, *more, name="run"):
        data = [] if self.data is None else [str(self.data)]
        return [*data, *self.flags, "--output", str(self.root), "--experiment", name, *more]

    def command(self, *more, name="run"):
        return [sys.executable, "-m", "fathoms", "train", *self.words(*more, name=name)]

    def trainer(self, *more, name="run", show=False):
        torch.set_num_threads(1)
        job = train_command.make_job(parse(train_command, "train", self.words(*more, name=name)))
        return Trainer(job, World(0, 1, torch.device("cpu")), show=show)

    def train(self, *more, name="run", show=False):
        return self.trainer(*more, name=name, show=show).run()

    def folder(self, name="run"):
        return self.root / name

    def checkpoint(self, name="run", which="last"):
        return self.root / name / "checkpoints" / which

    def summary(self, name="run"):
        return json.loads((self.root / name / "summary.json").read_text())

    def state(self, name="run", which="last"):
        return json.loads((self.checkpoint(name, which) / "state.json").read_text())

    def lines(self, file, name="run"):
        path = self.root / name / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def metrics(self, name="run"):
        """Metrics without those that depend on the clock."""
        kept = self.lines("metrics.jsonl", name)
        return [{key: value for key, value in row.items() if key != "images_per_second"} for row in kept]

    def weights(self, name="run", which="last"):
        """Every tensor of a checkpoint, as "model/blocks.0...", "optimizer/..." and "ema/..."."""
        files = sorted(self.checkpoint(name, which).glob("*.safetensors"))
        return {f"{file.stem}/{key}": value for file in files for key, value in load_file(file).items()}

    def same_weights(self, a, b):
        """Whether two runs ended with the same weights, moments and averages, bit for bit."""
        ours, theirs = self.weights(a), self.weights(b)
        return (
            bool(ours)
            and ours.keys() == theirs.keys()
            and all(torch.equal(ours[key], theirs[key]) for key in ours)
        )

    def same(self, a, b):
        """Whether two runs ended with the same weights and the same metrics."""
        return self.same_weights(a, b) and self.metrics(a) == self.metrics(b)


def before_update(trainer, number, act):
    """Call `act` right before update `number`, counted from 0."""
    update = trainer.loop.update

    def counted(batch):
        if trainer.loop.state.updates == number:
            act()
        update(batch)

    trainer.loop.update = counted


def kill_before_update(trainer, number):
    """End the run as a kill would, right before update `number`."""

    def kill():
        raise Killed

    before_update(trainer, number, kill)


def stop_after_update(trainer, number):
    """A signal that arrives during the update after which `number` are done."""
    update = trainer.loop.update

    def counted(batch):
        update(batch)
        if trainer.loop.state.updates == number:
            trainer.loop.stop.code = 143

    trainer.loop.update = counted


def poison(trainer, places, module, spoil, model=None):
    """Spoil the output of `module` for the batches at `places`, as (epoch, batch), which a marked pixel identifies.

    Tied to the data, not to a count of calls: replaying the batch gives the same fault. `model` sees the images; it is
    the trainer's own unless another computes.
    """
    loader, seen = trainer.context.data.train, SimpleNamespace(marked=False)
    epochs = loader.epoch

    def marked(epoch, start=0):
        for batch in epochs(epoch, start):
            if (batch.epoch, batch.number) in places:
                batch.images[0, 0, 0, 0] = MARK
            yield batch

    def look(_module, inputs):
        seen.marked = bool(inputs[0][0, 0, 0, 0] == MARK)

    loader.epoch = marked
    (model or trainer.model).register_forward_pre_hook(look)
    module.register_forward_hook(lambda _module, _inputs, output: spoil(output) if seen.marked else output)


def write_images(path):
    """Images of noise in four brightnesses, which are the classes, as an .npz file."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 256), ("val", 32)):
        labels = np.arange(count) % 4
        noise = rng.integers(0, 64, (count, 16, 16, 3))
        arrays |= {
            f"x_{split}": (noise + 60 * labels[:, None, None, None]).astype(np.uint8),
            f"y_{split}": labels,
        }
    np.savez(path, **arrays)
    return path
