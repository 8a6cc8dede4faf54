"""An optimizer's state by parameter name: tensors for safetensors, the rest for JSON, nothing to unpickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fathoms.errors import WeightsError
from fathoms.registry import nearest

# A group's own counter, which is as much part of the state as the moments are.
COUNTER = "step"


def named_state(
    optimizer: torch.optim.Optimizer, take: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors as "exp_avg/blocks.0.attn.qkv.weight", and what JSON can hold: the optimizer, names, counters.

    Learning rates and other settings are not in it: they follow from the recipe and the schedule. Sharded
    tensors (FSDP2) are put together one by one, so every process must call this; `take` gets each whole one.

    >>> groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "names": ["bias"]}]
    >>> tensors, record = named_state(torch.optim.SGD(groups, lr=0.1))
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
                    tensors[f"{kind}/{name}"] = take(_whole(value))
                else:
                    numbers[f"{kind}/{name}"] = value
            if COUNTER in group:
                numbers[f"{COUNTER}/{name}"] = group[COUNTER]
    record = {"optimizer": type(optimizer).__name__, "parameters": parameters, "numbers": numbers}
    return tensors, record


def load_named_state(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], record: dict[str, Any]
) -> None:
    """Put back what `named_state` gave; a name or tensor too many or too few is an error.

    Tensors go to the devices and dtypes that torch's own `load_state_dict` gives them, and are cut up again
    where the parameter is sharded, in whatever number of processes.
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

    whole = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        rows = zip(group["names"], group["params"], saved["params"], strict=True)
        for name, parameter, index in rows:
            entries = {kind: tensors.get(key := f"{kind}/{name}", numbers.get(key)) for kind in kinds[name]}
            _check_shapes(name, parameter, entries)
            if entries:
                state[index] = {kind: _as_sharded(value, parameter) for kind, value in entries.items()}
        if COUNTER in group:
            saved[COUNTER] = _common_count(group["names"], numbers)
    optimizer.load_state_dict({**whole, "state": state})


def _check_same(what: str, saved: set[str], expected: set[str]) -> None:
    """Refuse a state that has other names than the optimizer."""
    if missing := sorted(expected - saved):
        hint = f" (it has {nearest(missing[0], sorted(saved))!r})" if saved else ""
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


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def _as_sharded(value: Any, parameter: Tensor) -> Any:
    """The tensor cut up as its parameter is; counters stay whole."""
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    if not (whole and isinstance(parameter, DTensor)):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _common_count(names: list[str], numbers: dict[str, Any]) -> int:
    """The one counter of a group, which all its parameters must have been saved with."""
    counts = {numbers.get(f"{COUNTER}/{name}") for name in names}
    count = counts.pop()
    if counts or not isinstance(count, int):
        raise WeightsError(
            f"optimizer state: the parameters around {names[0]!r} were in other groups; "
            "use the same weight_decay and layer_decay"
        )
    return count
