"""A run small enough to be broken many times: 256 pictures of 16 pixels, four blocks of 32 channels."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fathoms.cli import train as train_command
from fathoms.cli.parse import parse
from fathoms.train.distributed import World
from fathoms.train.loop import Trainer

TINY = [
    *("--recipe", "digits", "--depth", "4", "--dim", "32", "--heads", "2"),
    *("--image-size", "16", "--patch-size", "4", "--epochs", "2", "--batch-size", "32", "--device", "cpu"),
]
UPDATES = 8
"""Of one epoch."""


class Lab:
    """Builds, runs and compares tiny runs under one folder."""

    def __init__(self, root, data):
        self.root, self.data = root, data

    def words(self, *more, name="run"):
        return [str(self.data), *TINY, "--output", str(self.root), "--experiment", name, *more]

    def command(self, *more, name="run"):
        return [sys.executable, "-m", "fathoms", "train", *self.words(*more, name=name)]

    def trainer(self, *more, name="run"):
        torch.set_num_threads(1)
        made = train_command.make_job(parse(train_command, "train", self.words(*more, name=name)))
        return Trainer(made, World(0, 1, torch.device("cpu")), show=False)

    def train(self, *more, name="run"):
        return self.trainer(*more, name=name).run()

    def folder(self, name="run"):
        return self.root / name

    def summary(self, name="run"):
        return json.loads((self.root / name / "summary.json").read_text())

    def state(self, name="run", which="last"):
        return json.loads((self.root / name / "checkpoints" / which / "state.json").read_text())

    def lines(self, file, name="run"):
        path = self.root / name / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def metrics(self, name="run"):
        """Metrics without what a clock decides."""
        kept = self.lines("metrics.jsonl", name)
        return [{key: value for key, value in row.items() if key != "images_per_second"} for row in kept]

    def weights(self, name="run", which="last"):
        files = sorted((self.root / name / "checkpoints" / which).glob("*.safetensors"))
        return {f"{file.stem}/{key}": value for file in files for key, value in load_file(file).items()}

    def same(self, a, b):
        """Whether two runs ended with the same weights, moments, averages and metrics."""
        ours, theirs = self.weights(a), self.weights(b)
        equal = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
        return bool(ours) and equal and self.metrics(a) == self.metrics(b)


MARK = 12345.0


def poison(trainer, places, module, spoil):
    """Spoil what `module` gives for the batches at `places`, which a mark in a pixel tells apart.

    Tied to the data, not to a count of calls: running the same batch once more gives the same fault.
    """
    epochs, seen = trainer.data.train.epoch, SimpleNamespace(marked=False)

    def marked(epoch, start=0):
        for batch in epochs(epoch, start):
            if (batch.epoch, batch.number) in places:
                batch.images[0, 0, 0, 0] = MARK
            yield batch

    def look(_module, inputs):
        seen.marked = bool(inputs[0][0, 0, 0, 0] == MARK)

    trainer.data.train.epoch = marked
    trainer.model.register_forward_pre_hook(look)
    module.register_forward_hook(lambda _module, _inputs, output: spoil(output) if seen.marked else output)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Noise of four brightnesses, which are the classes."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 32 * UPDATES), ("val", 32)):
        labels = np.arange(count) % 4
        noise = rng.integers(0, 64, (count, 16, 16, 3))
        arrays |= {
            f"x_{split}": (noise + 60 * labels[:, None, None, None]).astype(np.uint8),
            f"y_{split}": labels,
        }
    path = tmp_path_factory.mktemp("pictures") / "pictures.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture
def lab(tmp_path, pictures):
    return Lab(tmp_path, pictures)


@pytest.fixture
def spoil():
    return poison
