"""The state of a run as named tensors and plain values, and back: weights, EMA, optimizer, counters.

Nothing is pickled: tensors go to safetensors files, everything else to state.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fathoms.errors import WeightsError
from fathoms.models.weights import put_weights, weights_of
from fathoms.names.registry import nearest
from fathoms.train.checkpoint.folder import Checkpoint
from fathoms.train.context import RunContext, TrainState
from fathoms.train.distributed import spread_like, sum_over_ranks, whole
from fathoms.train.guard.policy import Guard
from fathoms.train.learner import Learner
from fathoms.train.optim.conditional_step import COUNTER
from fathoms.train.precision.machine import device_name

LINES = ("metrics.jsonl", "probe.jsonl", "guard.jsonl", "updates.jsonl")
"""Files of the run folder that a checkpoint records the length of."""

Stage = Callable[[Tensor], Tensor]
"""Gets each tensor whole, one after the other, and returns the copy that the checkpoint keeps."""


def counters(context: RunContext, state: TrainState, guard: Guard) -> dict[str, Any]:
    """The values of state.json, except those of the optimizer and the loss scaler."""
    # One row of sums for each rank, on the device.
    state.note_memory(context.world.device)
    rows = state.sums.new_zeros(context.world.size, len(state.sums))
    rows[context.world.rank] = state.sums
    return {
        **vars(state),
        "sums": sum_over_ranks(context.world, rows),
        "bad_images": dict(context.data.train.stats.bad),
        "lines": {name: context.folder.length(name) for name in LINES},
        "guard": guard.state_dict(),
        "identity": context.job.identity(),
        "data": context.data.fingerprint,
        "world": context.world.size,
        "batches_per_epoch": context.batches_per_epoch,
        "classes": list(context.data.classes),
        "device": device_name(context.world.device),
    }


def gather(learner: Learner, values: dict[str, Any], stage: Stage) -> Checkpoint:
    """Everything a run needs to resume; with sharded parameters every rank must call this."""
    moments, record = optimizer_state(learner.optimizer, stage)
    tensors = {"model": weights_of(learner.model)}
    if learner.ema is not None:
        tensors["ema"] = weights_of(learner.ema.module)
    full = {name: {key: stage(whole(value)) for key, value in part.items()} for name, part in tensors.items()}
    values = {key: stage(value) if isinstance(value, Tensor) else value for key, value in values.items()}
    values |= {"optimizer": record, "scaler": learner.scaler.state_dict(), "speed": vars(learner.speed)}
    return Checkpoint({**full, "optimizer": moments}, values)


def restore(checkpoint: Checkpoint, learner: Learner, where: str) -> None:
    """Put the tensors of a checkpoint back into the model, its EMA, the optimizer and the loss scaler."""
    put_weights(learner.model, checkpoint.tensors["model"], f"{where}/model", spread_like)
    if learner.compute_copy is not None:
        learner.compute_copy.push_weights()
    moments = checkpoint.tensors.get("optimizer", {})
    load_optimizer_state(learner.optimizer, moments, checkpoint.state["optimizer"])
    if learner.ema is not None:
        if "ema" not in checkpoint.tensors:
            raise WeightsError(f"{where}: has no EMA; leave --model-ema out, as this run began")
        put_weights(learner.ema.module, checkpoint.tensors["ema"], f"{where}/ema", spread_like)
    if checkpoint.state["scaler"]:
        learner.scaler.load_state_dict(checkpoint.state["scaler"])


def optimizer_state(
    optimizer: torch.optim.Optimizer, stage: Stage = lambda tensor: tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors as "exp_avg/blocks.0.attn.qkv.weight", and what JSON can hold: the optimizer, names, counters.

    Learning rates and other settings are left out: they follow from the recipe and the schedule. Sharded tensors
    (FSDP2) are gathered one by one, so every rank must call this.

    >>> groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "names": ["bias"]}]
    >>> tensors, record = optimizer_state(torch.optim.SGD(groups, lr=0.1))
    >>> tensors, record["parameters"]
    ({}, {'bias': []})
    """
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, list[str]] = {}
    numbers: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            parameters[name] = sorted(state)
            for kind, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{kind}/{name}"] = stage(whole(value).detach())
                else:
                    numbers[f"{kind}/{name}"] = value
            if COUNTER in group:
                numbers[f"{COUNTER}/{name}"] = group[COUNTER]
    record = {"optimizer": type(optimizer).__name__, "parameters": parameters, "numbers": numbers}
    return tensors, record


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], record: dict[str, Any]
) -> None:
    """Put back the result of `optimizer_state`; a missing or extra name or tensor is an error.

    Tensors get the devices and dtypes that torch's own `load_state_dict` gives them, and are sharded again where
    the parameter is, over any number of ranks.
    """
    ours = type(optimizer).__name__
    if record["optimizer"] != ours:
        raise WeightsError(
            f"optimizer state: saved by {record['optimizer']}, but the run uses {ours}; use the same optimizer"
        )
    kinds: dict[str, list[str]] = record["parameters"]
    names = [name for group in optimizer.param_groups for name in group["names"]]
    _check_same("parameter", set(kinds), set(names))
    numbers = record["numbers"]
    expected = {f"{kind}/{name}" for name in names for kind in kinds[name]}
    _check_same("tensor", set(tensors), expected - set(numbers))

    current = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, current["param_groups"], strict=True):
        rows = zip(group["names"], group["params"], saved["params"], strict=True)
        for name, parameter, index in rows:
            entries = {kind: tensors.get(key := f"{kind}/{name}", numbers.get(key)) for kind in kinds[name]}
            _check_shapes(name, parameter, entries)
            if entries:
                state[index] = {
                    # Only what has the parameter's shape is sharded; a counter kept as a tensor stays whole.
                    kind: spread_like(value, parameter) if isinstance(value, Tensor) else value
                    for kind, value in entries.items()
                }
        if COUNTER in group:
            saved[COUNTER] = _common_count(group["names"], numbers)
    optimizer.load_state_dict({**current, "state": state})


def _check_same(what: str, saved: set[str], expected: set[str]) -> None:
    """Refuse a state with other names than the optimizer's."""
    if missing := sorted(expected - saved):
        near = nearest(missing[0], sorted(saved))
        hint = f" (it has {near!r})" if near else ""
        raise WeightsError(
            f"optimizer state: {len(missing)} {what}s are missing, the first {missing[0]!r}{hint}; "
            "it belongs to another model"
        )
    if extra := sorted(saved - expected):
        raise WeightsError(
            f"optimizer state: {len(extra)} {what}s are not in this run, the first {extra[0]!r}; "
            "it belongs to another model"
        )


def _check_shapes(name: str, parameter: Tensor, entries: dict[str, Any]) -> None:
    for kind, value in entries.items():
        # A counter kept as a tensor has no dimensions, whatever the parameter has.
        if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise WeightsError(
                f"optimizer state: {kind}/{name} is {tuple(value.shape)}, the parameter "
                f"{tuple(parameter.shape)}; it belongs to another model"
            )


def _common_count(names: list[str], numbers: dict[str, Any]) -> int:
    """The one counter of a group, which all its parameters must have been saved with."""
    counts = {numbers.get(f"{COUNTER}/{name}") for name in names}
    count = counts.pop()
    if counts or not isinstance(count, int):
        raise WeightsError(
            f"optimizer state: the parameters around {names[0]!r} were in other groups; "
            "use the same --weight-decay and --layer-decay"
        )
    return count
