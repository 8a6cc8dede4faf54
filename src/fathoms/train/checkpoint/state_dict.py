"""The state of a run as plain named tensors and values, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import WeightsError
from fathoms.train.checkpoint.folder import Checkpoint
from fathoms.train.checkpoint.optimizer_state import load_named_state, named_state
from fathoms.train.distributed import spread_like, whole
from fathoms.train.learner import Learner


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, each once under its first name."""
    saved = model.state_dict().keys()
    buffers = {name: value for name, value in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


@torch.no_grad()
def put_weights(model: nn.Module, given: dict[str, Tensor], where: str) -> None:
    """Copy weights into a model that has exactly these names and shapes."""
    own = weights_of(model)
    if own.keys() != given.keys():
        odd = min(own.keys() ^ given.keys())
        raise WeightsError(
            f"{where}: {odd!r} is in the model or in the checkpoint only; they do not belong together"
        )
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise WeightsError(f"{where}: {name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}")
        tensor.copy_(spread_like(given[name], tensor))


def gather(learner: Learner, values: dict[str, Any], take: Callable[[Tensor], Tensor]) -> Checkpoint:
    """Everything a run needs to go on; with sharded parameters every rank must call this.

    `take` gets each tensor whole, one after the other, and gives what the checkpoint keeps of it.
    """
    moments, record = named_state(learner.optimizer, take)
    tensors = {"model": weights_of(learner.model)}
    if learner.ema is not None:
        tensors["ema"] = weights_of(learner.ema.module)
    full = {name: {key: take(whole(value)) for key, value in part.items()} for name, part in tensors.items()}
    values = {key: take(value) if isinstance(value, Tensor) else value for key, value in values.items()}
    values |= {"optimizer": record, "scaler": learner.scaler.state_dict()}
    return Checkpoint({**full, "optimizer": moments}, values)


def restore(checkpoint: Checkpoint, learner: Learner, where: str) -> None:
    """Put a checkpoint back."""
    put_weights(learner.model, checkpoint.tensors["model"], f"{where}/model")
    if learner.copies is not None:
        learner.copies.push_weights()
    moments = checkpoint.tensors.get("optimizer", {})
    load_named_state(learner.optimizer, moments, checkpoint.state["optimizer"])
    if learner.ema is not None:
        if "ema" not in checkpoint.tensors:
            raise WeightsError(f"{where}: holds no average; leave --model-ema out, as this run began")
        put_weights(learner.ema.module, checkpoint.tensors["ema"], f"{where}/ema")
    if checkpoint.state["scaler"]:
        learner.scaler.load_state_dict(checkpoint.state["scaler"])
