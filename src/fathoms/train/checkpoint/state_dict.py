"""The state of a run as plain named tensors and values, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fathoms.errors import WeightsError
from fathoms.models.weights import put_weights, weights_of
from fathoms.train.checkpoint.folder import Checkpoint
from fathoms.train.checkpoint.optimizer_state import load_named_state, named_state
from fathoms.train.distributed import spread_like, whole
from fathoms.train.learner import Learner


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
    put_weights(learner.model, checkpoint.tensors["model"], f"{where}/model", spread_like)
    if learner.copies is not None:
        learner.copies.push_weights()
    moments = checkpoint.tensors.get("optimizer", {})
    load_named_state(learner.optimizer, moments, checkpoint.state["optimizer"])
    if learner.ema is not None:
        if "ema" not in checkpoint.tensors:
            raise WeightsError(f"{where}: holds no average; leave --model-ema out, as this run began")
        put_weights(learner.ema.module, checkpoint.tensors["ema"], f"{where}/ema", spread_like)
    if checkpoint.state["scaler"]:
        learner.scaler.load_state_dict(checkpoint.state["scaler"])
