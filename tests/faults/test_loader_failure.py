"""F20 and F21: a loader that fails ends the run, and the run resumes from the last update."""

from __future__ import annotations

import pytest

from fathoms.data import LoaderError
from tiny_runs import TinyRuns


def fail_at(trainer, number):
    """A loader that loses its second worker when it is asked for batch `number`."""
    epochs = trainer.context.data.train.epoch

    def failing(epoch, start=0):
        for batch in epochs(epoch, start):
            if batch.number == number:
                raise LoaderError(
                    "loader: data-worker-0 died at train/7.jpg, and a worker was replaced before"
                )
            yield batch

    trainer.context.data.train.epoch = failing


def test_a_loader_that_gives_up_loses_no_update(tiny_runs):
    tiny_runs.train("--epochs", "1", name="whole")
    trainer = tiny_runs.trainer("--epochs", "1", name="cut")
    fail_at(trainer, 3)
    with pytest.raises(LoaderError, match="data-worker-0 died at train/7.jpg"):
        trainer.run()
    assert tiny_runs.summary("cut")["status"] == "failed"
    assert "data-worker-0" in str(tiny_runs.summary("cut"))
    assert (tiny_runs.state("cut")["epoch"], tiny_runs.state("cut")["batch"]) == (0, 3)
    assert tiny_runs.train("--epochs", "1", name="cut").code == 0
    assert tiny_runs.same("cut", "whole")


def test_half_an_update_is_done_again(tiny_runs):
    words = ["--epochs", "1", "--grad-accum-steps", "2"]
    tiny_runs.train(*words, name="whole")
    trainer = tiny_runs.trainer(*words, name="half")
    fail_at(trainer, 3)
    with pytest.raises(LoaderError):
        trainer.run()
    assert (tiny_runs.state("half")["batch"], tiny_runs.state("half")["updates"]) == (2, 1)
    assert tiny_runs.train(*words, name="half").code == 0
    assert tiny_runs.same("half", "whole")


def test_batchnorm_and_its_average_do_not_depend_on_when_a_run_saves(tmp_path, tiny_images):
    """Statistics move in the forward pass, before the host knows how the previous update went."""
    words = ["--model", "timm/test_resnet", "--model-ema", "--model-ema-decay", "0.9", "--lr", "1e-2"]
    words += ["--epochs", "1", "--batch-size", "32", "--grad-accum-steps", "2", "--device", "cpu"]
    runs = TinyRuns(tmp_path, words, tiny_images)
    runs.train(name="whole")
    runs.train("--recovery-interval", "1", name="saving")
    assert runs.same_weights("saving", "whole")
    trainer = runs.trainer(name="half")
    fail_at(trainer, 3)
    with pytest.raises(LoaderError):
        trainer.run()
    runs.train(name="half")
    assert runs.same_weights("half", "whole")


def test_an_error_that_nobody_foresaw_is_the_runs_reason_in_words(tiny_runs, monkeypatch):
    trainer = tiny_runs.trainer("--epochs", "1", name="cut")

    def fail(*_):
        raise KeyError("w")

    monkeypatch.setattr(trainer.loop, "run", fail)
    with pytest.raises(KeyError):
        trainer.run()
    summary = tiny_runs.summary("cut")
    assert (summary["status"], summary["reason"]) == ("failed", "an error that fathoms did not foresee ('w')")
