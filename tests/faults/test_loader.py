"""F20 and F21: a loader that gave up ends the run, and the run goes on from the last update."""

from __future__ import annotations

import pytest

from fathoms.data import LoaderError


def fail_at(trainer, step):
    """A loader that loses its second worker when it is asked for batch number `step`."""
    epochs = trainer.data.train.epoch

    def failing(epoch, start=0):
        for batch in epochs(epoch, start):
            if batch.number == step:
                raise LoaderError(
                    "loader: data-worker-0 died at train/7.jpg, and a worker was replaced before"
                )
            yield batch

    trainer.data.train.epoch = failing


def test_a_loader_that_gives_up_loses_no_update(lab):
    lab.train("--epochs", "1", name="whole")
    trainer = lab.trainer("--epochs", "1", name="cut")
    fail_at(trainer, 3)
    with pytest.raises(LoaderError, match="data-worker-0 died at train/7.jpg"):
        trainer.run()
    assert lab.summary("cut")["status"] == "failed"
    assert "data-worker-0" in str(lab.summary("cut"))
    assert (lab.state("cut")["epoch"], lab.state("cut")["step"]) == (0, 3)
    assert lab.train("--epochs", "1", name="cut").code == 0
    assert lab.same("cut", "whole")


def test_half_an_update_is_done_again(lab):
    words = ["--epochs", "1", "--grad-accum-steps", "2"]
    lab.train(*words, name="whole")
    trainer = lab.trainer(*words, name="half")
    fail_at(trainer, 3)
    with pytest.raises(LoaderError):
        trainer.run()
    assert (lab.state("half")["step"], lab.state("half")["updates"]) == (2, 1)
    assert lab.train(*words, name="half").code == 0
    assert lab.same("half", "whole")
