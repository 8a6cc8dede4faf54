"""The warning before a run on a CPU that needs more memory than there is."""

from __future__ import annotations

import pytest

from fathoms.cli import train
from fathoms.cli.flags.parse import parse
from fathoms.models.vit import ViT
from fathoms.train.record import memory_note

SMALL = ["--depth", "4", "--dim", "32", "--heads", "2", "--device", "cpu"]


@pytest.fixture
def notes(monkeypatch):
    def made(memory, *words, batch_size=100):
        monkeypatch.setattr(memory_note, "usable_memory", lambda: memory)
        job = train.make_job(parse(train, "train", [*SMALL, *words]))
        return memory_note.memory_notes(job, ViT(job.config), batch_size, "fp32")

    return made


def test_a_batch_beyond_the_memory_is_told_in_one_line(notes):
    (line,) = notes(2**20)
    assert line.startswith("memory: a batch of 100 needs about 0.0")
    assert line.endswith(
        "this machine has 0.000977; a smaller --batch-size or a larger --patch-size needs less"
    )


def test_nothing_is_said_where_it_fits_or_the_memory_is_unknown(notes):
    assert notes(2**25) == notes(2**34) == notes(None) == []


def test_nothing_is_said_where_activations_are_computed_again(notes):
    assert notes(2**20, "--grad-checkpointing") == []


def test_a_run_prints_it_before_the_first_epoch(monkeypatch, tmp_path, capsys):
    from fathoms.cli.main import main

    monkeypatch.setattr(memory_note, "usable_memory", lambda: 2**20)
    words = ["--epochs", "1", "--warmup-epochs", "0", "--output", str(tmp_path)]
    assert main(["train", *SMALL, *words]) == 0
    said = "".join(capsys.readouterr())
    assert said.index("memory: a batch of ") < said.index("epoch 1/1")
