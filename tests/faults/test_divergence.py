"""F13 to F15 and F17: non-finite losses and gradients, loss spikes, overflow in half precision."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fathoms.data import LoaderError
from fathoms.data.sampler import Batch
from fathoms.training import guard
from fathoms.training.checkpoint_save import optimizer_state
from fathoms.training.distributed import World
from fathoms.training.guard import Guard
from fathoms.training.job import RunOptions
from fathoms.training.run_folder import DIVERGED
from fathoms.training.step import UpdateReport
from tiny_runs import poison

CPU = torch.device("cpu")


def nan_output(output):
    return output * float("nan")


def nan_gradient(output):
    output.register_hook(lambda gradient: gradient * float("inf"))
    return output


def huge_gradient(output):
    output.register_hook(lambda gradient: gradient * 1e25)
    return output


def everything(trainer):
    """Everything that an update may change."""
    moments, record = optimizer_state(trainer.learner.optimizer)
    tensors = {**dict(trainer.model.named_parameters()), **moments}
    if trainer.learner.ema is not None:
        tensors |= {f"ema/{name}": value for name, value in trainer.learner.ema.module.state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, json.dumps(record)


def note_before_update(trainer, number):
    """A list that receives everything as it is right before update `number` is applied."""
    kept, step = [], trainer.loop.stepper.conditional_step.step

    def noted(hold):
        if trainer.loop.state.updates == number:
            kept.append(everything(trainer))
        step(hold)

    trainer.loop.stepper.conditional_step.step = noted
    return kept


@pytest.mark.parametrize(
    ("fault", "opt", "message"),
    [
        (nan_output, "adamw", "not a finite number (loss nan), first in the output of blocks.1.mlp"),
        (nan_gradient, "lamb", "in the gradient of blocks.1.mlp.fc2."),
        (huge_gradient, "adamw", "in the norm of the gradient, which is largest in blocks."),
    ],
    ids=["F13-loss", "F14-gradient", "F14-norm"],
)
def test_a_bad_number_stops_the_run_before_the_weights_and_names_layer_and_batch(
    tiny_runs, fault, opt, message
):
    trainer = tiny_runs.trainer("--opt", opt, "--model-ema", "--model-ema-decay", "0.5")
    poison(trainer, {(0, 3)}, trainer.model.blocks[1].mlp, fault)
    before = note_before_update(trainer, 3)
    outcome = trainer.run()
    assert outcome.code == DIVERGED
    summary = tiny_runs.summary()
    assert summary["status"] == "diverged"
    assert message in summary["reason"]
    assert "epoch 1, update 4, batch 3" in summary["reason"]
    (tensors, record), (now, record_now) = before[0], everything(trainer)
    assert all(torch.equal(now[name], tensor) for name, tensor in tensors.items())
    assert record == record_now
    [row] = tiny_runs.lines("guard.jsonl")
    assert (row["epoch"], row["update"], row["cause"]["step"]) == (1, 4, 3)
    assert len(row["cause"]["files"]) == 32
    assert all(name.startswith("train[") for name in row["cause"]["files"])
    assert not (tiny_runs.folder() / "checkpoints" / "best").exists()


def test_of_the_ranks_the_one_with_a_bad_layer_is_blamed_then_the_one_with_a_bad_loss(monkeypatch):
    """DDP averages a bad gradient over all ranks, so that each reports one."""
    batch = Batch(
        torch.ones(1, 2), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, 0
    )
    model = torch.nn.Linear(2, 1)
    gradient = {"rank": 1, "layer": None, "loss": 1.0}
    loss = {"rank": 2, "layer": None, "loss": math.nan}
    layer = {"rank": 3, "layer": "fc", "loss": 1.0}
    for reports, blamed in (([gradient, loss, layer], 3), ([gradient, None, loss], 2), ([None, gradient], 1)):
        monkeypatch.setattr(guard, "gather_objects", lambda _world, _mine, reports=reports: reports)
        found = guard.locate_nonfinite(model, lambda b: model(b.images).sum(), [batch], str, World(0, 1, CPU))
        assert found["rank"] == blamed


@pytest.mark.parametrize("more", [(), ("--train-feature-decay", "0.1")], ids=["plain", "penalties"])
def test_a_fault_of_the_bfloat16_copy_is_located_in_it(tiny_runs, more):
    trainer = tiny_runs.trainer("--precision", "bf16", *more)
    copy = trainer.learner.compute_copy.module
    block = copy.get_submodule("vit.blocks.1" if more else "blocks.1")
    poison(trainer, {(0, 3)}, block.mlp, nan_output, model=copy)
    assert trainer.run().code == DIVERGED
    assert "first in the output of blocks.1.mlp;" in tiny_runs.summary()["reason"]


def test_a_skipped_update_is_as_if_its_batch_had_not_been_and_too_many_stop_the_run(tiny_runs):
    trainer = tiny_runs.trainer("--guard", "skip", "--model-ema", "--model-ema-decay", "0.5", name="skipped")
    poison(trainer, {(0, 3), (1, 2)}, trainer.model.blocks[2].attn, nan_output)
    assert trainer.run().code == 0
    assert tiny_runs.summary("skipped")["guard"]["skipped"] == 2
    assert [row["update"] for row in tiny_runs.lines("guard.jsonl", "skipped")] == [4, 11]
    assert all(math.isfinite(row["loss"]) for row in tiny_runs.metrics("skipped"))
    assert all(value.isfinite().all() for value in tiny_runs.weights("skipped").values())
    # The other way to the same end: pass the two batches over without ever computing them.
    other = tiny_runs.trainer("--model-ema", "--model-ema-decay", "0.5", name="passed")
    other.loop.guard.passed_over = {3, 10}
    assert other.run().code == 0
    ours, theirs = tiny_runs.weights("skipped"), tiny_runs.weights("passed")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    trainer = tiny_runs.trainer("--guard", "skip", "--guard-limit", "2", name="many")
    poison(trainer, {(0, batch) for batch in range(4, 8)}, trainer.model.blocks[2].attn, nan_output)
    assert trainer.run().code == DIVERGED
    assert [row["act"] for row in tiny_runs.lines("guard.jsonl", "many")] == ["skip", "skip", "stop"]


def test_a_rollback_halves_the_rate_skips_the_batch_and_ends_the_same_twice(tiny_runs, monkeypatch):
    words = ["--guard", "rollback", "--recovery-interval", "3"]
    for name in ("one", "two"):
        trainer = tiny_runs.trainer(*words, name=name)
        poison(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
        assert trainer.run().code == 0
        guard = tiny_runs.summary(name)["guard"]
        assert (guard["rollbacks"], guard["lr_factor"]) == (1, 0.5)
        assert tiny_runs.lines("guard.jsonl", name)[0]["act"] == "rollback"
    assert tiny_runs.same("one", "two")
    plain = tiny_runs.trainer(name="plain")
    plain.run()
    assert tiny_runs.metrics("one")[0]["lr"] == tiny_runs.metrics("plain")[0]["lr"] / 2
    assert tiny_runs.metrics("one")[-1]["step"] == tiny_runs.metrics("plain")[-1]["step"]

    # Killed after the rollback, the run resumes to the same end.
    trainer = tiny_runs.trainer(*words, name="cut")
    poison(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
    monkeypatch.setattr(trainer.loop, "_finish_epoch", lambda _rate: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    monkeypatch.undo()
    assert tiny_runs.summary("cut")["status"] == "failed"
    assert tiny_runs.summary("cut")["reason"] == "an error that fathoms did not foresee (division by zero)"
    assert tiny_runs.state("cut")["guard"]["rollbacks"] == 1
    assert tiny_runs.train(*words, name="cut").code == 0
    assert tiny_runs.same("one", "cut")


def test_rollbacks_come_to_an_end(tiny_runs):
    trainer = tiny_runs.trainer("--guard", "rollback", "--guard-limit", "2")
    poison(trainer, {(0, batch) for batch in range(3, 8)}, trainer.model.blocks[0].mlp, nan_output)
    assert trainer.run().code == DIVERGED
    assert [row["act"] for row in tiny_runs.lines("guard.jsonl")] == ["rollback", "rollback", "stop"]


def test_a_signal_or_a_lost_loader_right_after_a_bad_update_leaves_a_run_that_resumes(tiny_runs):
    """The host learns of a bad update one update later, when there may be none."""
    for name in ("signal", "loader"):
        trainer = tiny_runs.trainer("--guard", "rollback", "--recovery-interval", "4", name=name)
        poison(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
        update, epochs = trainer.loop.update, trainer.context.data.train.epoch

        def signalled(batch, trainer=trainer, update=update):
            update(batch)
            if trainer.loop.state.updates == 6:
                trainer.loop.stop.code = 143

        def failing(epoch, start=0, epochs=epochs):
            for batch in epochs(epoch, start):
                if batch.number == 6:
                    raise LoaderError("loader: gave up")
                yield batch

        if name == "signal":
            trainer.loop.update = signalled
            assert trainer.run().code == 143
            assert tiny_runs.state(name)["guard"]["passed_over"] == [5]
        else:
            trainer.context.data.train.epoch = failing
            with pytest.raises(LoaderError):
                trainer.run()
        assert tiny_runs.state(name)["updates"] == 4
        trainer = tiny_runs.trainer("--guard", "rollback", "--recovery-interval", "4", name=name)
        poison(trainer, {(0, 5)}, trainer.model.blocks[0].mlp, nan_output)
        assert trainer.run().code == 0
        assert tiny_runs.summary(name)["guard"]["rollbacks"] == 1
    assert tiny_runs.same("signal", "loader")


def test_a_spike_is_logged_and_may_be_rolled_back(tiny_runs):
    """F15: one batch with labels turned into noise a thousand times too loud, after twenty-six calm updates."""
    for act, rollbacks in (("log", 0), ("rollback", 1)):
        trainer = tiny_runs.trainer("--epochs", "4", "--on-spike", act, name=act)
        poison(trainer, {(3, 2)}, trainer.model.head, lambda output: output * 1e3)
        assert trainer.run().code == 0
        rows = tiny_runs.lines("guard.jsonl", act)
        assert (rows[0]["kind"], rows[0]["act"], rows[0]["update"]) == ("spike", act, 27)
        assert rows[0]["score"] > 10
        assert tiny_runs.summary(act)["guard"]["rollbacks"] == rollbacks


def test_best_is_never_a_model_whose_evaluation_is_not_finite(tiny_runs):
    trainer = tiny_runs.trainer()
    trainer.model.head.register_forward_hook(
        lambda module, _inputs, output: (
            output if module.training or trainer.loop.state.epoch < 2 else output * float("nan")
        )
    )
    assert trainer.run().code == DIVERGED
    summary = tiny_runs.summary()
    assert summary["status"] == "diverged"
    assert "the loss of the last weights on val is not finite" in summary["reason"]
    assert summary["best"]["epoch"] == 1
    assert tiny_runs.lines("guard.jsonl")[0]["kind"] == "evaluation_not_finite"
    assert tiny_runs.state(which="best")["updates"] == 8


def test_half_precision_scaling_is_saved_and_its_overflows_are_not_divergence(tiny_runs):
    """F17: the first updates of float16 overflow by design; the scaler halves its scale and continues."""
    words = ["--amp", "--amp-dtype", "float16", "--recovery-interval", "4"]
    trainer = tiny_runs.trainer(*words, name="whole")
    poison(trainer, {(0, 1)}, trainer.model.blocks[1].mlp, nan_gradient)
    assert trainer.run().code == 0
    assert tiny_runs.state("whole")["scaler"]["scale"] == 65536 / 2
    assert tiny_runs.summary("whole")["guard"]["skipped"] == 0
    trainer = tiny_runs.trainer(*words, name="loss")
    poison(trainer, {(0, 1)}, trainer.model.blocks[1].mlp, nan_output)
    assert trainer.run().code == DIVERGED

    options, report = RunOptions(guard="stop"), UpdateReport(0, 0, (0, 1), 2.0, float("inf"), 0)
    guard = Guard(options, scaled=True)
    assert [guard.judge(report) for _ in range(24)] == [None] * 24
    assert guard.judge(report).act == "stop"
