"""Parameter groups for an optimizer: weight decay, layer-wise learning-rate decay, transfer over depth and width."""

from __future__ import annotations

from typing import Any

from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.names.optimizers import EPS, OptimizerName, state_values
from fathoms.parts.residuals.transfer import Multipliers, Transfer
from fathoms.text_table import aligned


class ParamGroups(list[dict[str, Any]]):
    """Groups for a torch optimizer: `params`, `weight_decay`, `lr_scale`, `eps_scale`, `width`, `names`, `why`."""

    def at(self, lr: float, eps: float = EPS) -> list[dict[str, Any]]:
        """The groups with a learning rate and an epsilon each, for an Adam of your own.

        torch's optimizers know no scales: without this they would give every group the same learning rate.
        """
        return [{**group, "lr": lr * group["lr_scale"], "eps": eps * group["eps_scale"]} for group in self]

    def table(self) -> str:
        """One line per parameter: its group, weight decay, factors of learning rate and epsilon, and the reason."""
        rows = []
        for index, group in enumerate(self):
            numbers = [f"{group[key]:.3g}" for key in ("weight_decay", "lr_scale", "eps_scale")]
            rows += [(str(index), *numbers, name, group["why"]) for name in group["names"]]
        return aligned(("group", "decay", "lr x", "eps x", "parameter", "why"), rows)


def state_bytes(model: nn.Module, opt: OptimizerName) -> int:
    """Bytes that an optimizer keeps of a model's trainable parameters after its first step."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return sum(p.element_size() * state_values(opt, [(name, p.shape)]) for name, p in trained)


def why_no_decay(parameter: nn.Parameter) -> str | None:
    """The reason why a parameter takes no weight decay, or None."""
    if getattr(parameter, "_no_weight_decay", False):
        return "marked _no_weight_decay"
    return "one-dimensional" if parameter.ndim <= 1 else None


def layer_of(model: nn.Module, name: str) -> int:
    """The layer of a parameter for layer decay: 0 for the stem, 1 to L for the blocks, L + 1 after them."""
    if not isinstance(model, ViT):
        raise ConfigError(
            f"param_groups: layer_decay knows the layers of fathoms models only, not of "
            f"{type(model).__name__}; leave it out"
        )
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) + 1
    if first == "readout" and model.readout.travelling:
        # Queries that join late belong to the layer that they come after.
        return model.readout.joins
    return 0 if first in ("stem", "position", "registers") else model.config.depth + 1


def _transfer_of(model: nn.Module) -> Transfer:
    return model.transfer if isinstance(model, ViT) else Transfer()


def _group(parameter: nn.Parameter, rule: Multipliers, weight_decay: float, scale: float) -> dict[str, Any]:
    """An empty group for parameters like this one."""
    reason = why_no_decay(parameter)
    return {
        "params": [],
        "names": [],
        "weight_decay": 0.0 if reason else weight_decay * rule.decay,
        "lr_scale": scale * rule.lr,
        "eps_scale": rule.eps,
        "width": rule.width,
        "why": "; ".join(filter(None, (reason or "a matrix", rule.why))),
    }


def param_groups(model: nn.Module, weight_decay: float, layer_decay: float | None = None) -> ParamGroups:
    """Group parameters by weight decay, learning-rate scale and epsilon.

    Parameters that are marked `_no_weight_decay` (LayerScale, class token, positions) or have one dimension take
    no decay. With `layer_decay` d, the learning rate of layer l of L + 1 is scaled by d^(L + 1 - l). Residual methods
    that transfer over depth and width (completep) multiply all three by the rules of
    `fathoms.parts.residuals.transfer`.

    >>> from fathoms.models.zoo import create_model
    >>> groups = param_groups(create_model("vit_tiny_patch16_224"), weight_decay=0.05)
    >>> [group["weight_decay"] for group in groups]
    [0.05, 0.0, 0.0]
    """
    if weight_decay < 0 or (layer_decay is not None and not 0 < layer_decay <= 1):
        raise ConfigError(
            f"param_groups: weight_decay={weight_decay}, layer_decay={layer_decay}; "
            "the first must be zero or more, the second in (0, 1]"
        )
    transfer = _transfer_of(model)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0
        if layer_decay is not None:
            scale = layer_decay ** (layer_of(model, "head") - layer_of(model, name))
        own = _group(parameter, transfer.of(name, parameter.ndim), weight_decay, scale)
        # What differs between groups, in the order of their first parameters.
        kind = tuple(own[key] for key in ("lr_scale", "eps_scale", "width", "why"))
        group = groups.setdefault(kind, own)
        group["params"].append(parameter)
        group["names"].append(name)
    return ParamGroups(groups.values())
