"""F13 to F15 and F17: numbers that are not finite, losses that jump, overflow in half precision."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from fathoms.data import LoaderError
from fathoms.train.checkpoint.optimizer_state import named_state
from fathoms.train.guard.policy import Guard
from fathoms.train.guard.readback import Seen
from fathoms.train.job import RunOptions
from fathoms.train.loop import DIVERGED


def nan_output(output):
    return output * float("nan")


def nan_gradient(output):
    output.register_hook(lambda gradient: gradient * float("inf"))
    return output


def everything(trainer):
    """All that an update may change."""
    moments, record = named_state(trainer.learner.optimizer)
    tensors = {**dict(trainer.model.named_parameters()), **moments}
    if trainer.learner.ema is not None:
        tensors |= {f"ema/{name}": value for name, value in trainer.learner.ema.state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, json.dumps(record)


def note_before_update(trainer, number):
    """A place that gets everything as it is right before update `number` is taken."""
    kept, step = [], trainer.stepper.gate.step

    def noted(hold):
        if trainer.course.updates == number:
            kept.append(everything(trainer))
        step(hold)

    trainer.stepper.gate.step = noted
    return kept


@pytest.mark.parametrize(
    ("fault", "opt", "told"),
    [
        (nan_output, "adamw", "not a finite number (loss nan), first in the output of blocks.1.mlp"),
        (nan_gradient, "lamb", "in the gradient of blocks.1.mlp.fc2."),
    ],
    ids=["F13-loss", "F14-gradient"],
)
def test_a_bad_number_stops_the_run_before_the_weights_and_names_layer_and_batch(
    lab, spoil, fault, opt, told
):
    trainer = lab.trainer("--opt", opt, "--model-ema", "--model-ema-decay", "0.5")
    spoil(trainer, {(0, 3)}, trainer.model.blocks[1].mlp, fault)
    before = note_before_update(trainer, 3)
    outcome = trainer.run()
    assert outcome.code == DIVERGED
    summary = lab.summary()
    assert summary["status"] == "diverged"
    assert told in summary["reason"]
    assert "epoch 0, update 3, step 3" in summary["reason"]
    (tensors, record), (now, record_now) = before[0], everything(trainer)
    assert all(torch.equal(now[name], tensor) for name, tensor in tensors.items())
    assert record == record_now
    [row] = lab.lines("guard.jsonl")
    assert row["cause"]["step"] == 3
    assert len(row["cause"]["files"]) == 32
    assert all(name.startswith("train[") for name in row["cause"]["files"])
    assert not (lab.folder() / "checkpoints" / "best").exists()


@pytest.mark.parametrize("more", [(), ("--train-feature-decay", "0.1")], ids=["plain", "penalties"])
def test_a_fault_of_the_copies_in_bfloat16_is_found_in_them(lab, spoil, more):
    trainer = lab.trainer("--precision", "bf16", *more)
    copy = trainer.learner.copies.module
    block = copy.get_submodule("vit.blocks.1" if more else "blocks.1")
    spoil(SimpleNamespace(model=copy, data=trainer.data), {(0, 3)}, block.mlp, nan_output)
    assert trainer.run().code == DIVERGED
    assert "first in the output of blocks.1.mlp;" in lab.summary()["reason"]


def test_a_skipped_update_is_as_if_its_batch_had_not_been_and_too_many_stop_the_run(lab, spoil):
    trainer = lab.trainer("--guard", "skip", "--model-ema", "--model-ema-decay", "0.5", name="skipped")
    spoil(trainer, {(0, 3), (1, 2)}, trainer.model.blocks[2].attn, nan_output)
    assert trainer.run().code == 0
    assert lab.summary("skipped")["guard"]["skipped"] == 2
    assert [row["update"] for row in lab.lines("guard.jsonl", "skipped")] == [3, 10]
    assert all(math.isfinite(row["loss"]) for row in lab.metrics("skipped"))
    assert all(value.isfinite().all() for value in lab.weights("skipped").values())
    # The other way to the same end: pass the two batches over without ever computing them.
    other = lab.trainer("--model-ema", "--model-ema-decay", "0.5", name="passed")
    other.guard.passed_over = {3, 10}
    assert other.run().code == 0
    ours, theirs = lab.weights("skipped"), lab.weights("passed")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    trainer = lab.trainer("--guard", "skip", "--guard-limit", "2", name="many")
    spoil(trainer, {(0, step) for step in range(4, 8)}, trainer.model.blocks[2].attn, nan_output)
    assert trainer.run().code == DIVERGED
    assert [row["act"] for row in lab.lines("guard.jsonl", "many")] == ["skip", "skip", "stop"]


def test_a_rollback_halves_the_rate_passes_over_the_batch_and_ends_the_same_twice(lab, spoil, monkeypatch):
    words = ["--guard", "rollback", "--recovery-interval", "3"]
    for name in ("one", "two"):
        trainer = lab.trainer(*words, name=name)
        spoil(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
        assert trainer.run().code == 0
        guard = lab.summary(name)["guard"]
        assert (guard["rollbacks"], guard["lr_factor"]) == (1, 0.5)
        assert lab.lines("guard.jsonl", name)[0]["act"] == "rollback"
    assert lab.same("one", "two")
    plain = lab.trainer(name="plain")
    plain.run()
    assert lab.metrics("one")[0]["lr"] == lab.metrics("plain")[0]["lr"] / 2
    assert lab.metrics("one")[-1]["step"] == lab.metrics("plain")[-1]["step"]

    # Killed after the rollback, the run goes on to the same end.
    trainer = lab.trainer(*words, name="cut")
    spoil(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
    monkeypatch.setattr(trainer, "_finish_epoch", lambda _rate: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    monkeypatch.undo()
    assert lab.state("cut")["guard"]["rollbacks"] == 1
    assert lab.train(*words, name="cut").code == 0
    assert lab.same("one", "cut")


def test_rollbacks_come_to_an_end(lab, spoil):
    trainer = lab.trainer("--guard", "rollback", "--guard-limit", "2")
    spoil(trainer, {(0, step) for step in range(3, 8)}, trainer.model.blocks[0].mlp, nan_output)
    assert trainer.run().code == DIVERGED
    assert [row["act"] for row in lab.lines("guard.jsonl")] == ["rollback", "rollback", "stop"]


def test_a_signal_or_a_lost_loader_right_after_a_bad_update_leaves_a_run_that_goes_on(lab, spoil):
    """The host learns of a bad update one update later, when there may be none."""
    for name in ("signal", "loader"):
        trainer = lab.trainer("--guard", "rollback", "--recovery-interval", "4", name=name)
        spoil(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
        update, epochs = trainer._update, trainer.data.train.epoch

        def signalled(batch, trainer=trainer, update=update):
            update(batch)
            if trainer.course.updates == 6:
                trainer.stop.code = 143

        def failing(epoch, start=0, epochs=epochs):
            for batch in epochs(epoch, start):
                if batch.number == 6:
                    raise LoaderError("loader: gave up")
                yield batch

        if name == "signal":
            trainer._update = signalled
            assert trainer.run().code == 143
            assert lab.state(name)["guard"]["passed_over"] == [5]
        else:
            trainer.data.train.epoch = failing
            with pytest.raises(LoaderError):
                trainer.run()
        assert lab.state(name)["updates"] == 4
        trainer = lab.trainer("--guard", "rollback", "--recovery-interval", "4", name=name)
        spoil(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
        assert trainer.run().code == 0
        assert lab.summary(name)["guard"]["rollbacks"] == 1
    assert lab.same("signal", "loader")


def test_a_spike_is_noted_and_may_be_rolled_back(lab, spoil):
    """F15: one batch with labels turned into noise a thousand times too loud, after twenty-six calm updates."""
    for act, rollbacks in (("log", 0), ("rollback", 1)):
        trainer = lab.trainer("--epochs", "4", "--on-spike", act, name=act)
        spoil(trainer, {(3, 2)}, trainer.model.head, lambda output: output * 1e3)
        assert trainer.run().code == 0
        rows = lab.lines("guard.jsonl", act)
        assert (rows[0]["kind"], rows[0]["act"], rows[0]["update"]) == ("spike", act, 26)
        assert rows[0]["score"] > 10
        assert lab.summary(act)["guard"]["rollbacks"] == rollbacks


def test_best_is_never_a_model_whose_evaluation_is_not_finite(lab):
    trainer = lab.trainer()
    trainer.model.head.register_forward_hook(
        lambda module, _inputs, output: (
            output if module.training or trainer.course.epoch < 2 else output * float("nan")
        )
    )
    assert trainer.run().code == 0
    assert lab.summary()["best"]["epoch"] == 0
    assert lab.lines("guard.jsonl")[0]["kind"] == "evaluation_not_finite"
    assert lab.state(which="best")["updates"] == 8


def test_half_precision_scaling_is_saved_and_its_overflows_are_no_divergence(lab, spoil):
    """F17: the first updates of float16 overflow by design; the scaler halves its scale and goes on."""
    words = ["--amp", "--amp-dtype", "float16", "--recovery-interval", "4"]
    trainer = lab.trainer(*words, name="whole")
    spoil(trainer, {(0, 1)}, trainer.model.blocks[1].mlp, nan_gradient)
    assert trainer.run().code == 0
    assert lab.state("whole")["scaler"]["scale"] == 65536 / 2
    assert lab.summary("whole")["guard"]["skipped"] == 0
    trainer = lab.trainer(*words, name="loss")
    spoil(trainer, {(0, 1)}, trainer.model.blocks[1].mlp, nan_output)
    assert trainer.run().code == DIVERGED

    options, seen = RunOptions(guard="stop"), Seen(0, 0, (0, 1), 2.0, float("inf"), 0)
    guard = Guard(options, scaled=True)
    assert [guard.judge(seen) for _ in range(24)] == [None] * 24
    assert guard.judge(seen).act == "stop"
