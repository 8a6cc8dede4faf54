"""Parameter groups for an optimizer: weight decay and layer-wise learning-rate decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.text_table import aligned


class ParamGroups(list[dict[str, Any]]):
    """Groups for a torch optimizer: `params`, `weight_decay`, `lr_scale`, `names`, `why`."""

    def table(self) -> str:
        """One line per parameter: its group, weight decay, learning-rate scale, and the reason."""
        rows = []
        for index, group in enumerate(self):
            numbers = (str(index), f"{group['weight_decay']:g}", f"{group['lr_scale']:.3g}")
            rows += [(*numbers, name, group["why"]) for name in group["names"]]
        return aligned(("group", "decay", "lr x", "parameter", "why"), rows)


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
    travels = first == "readout" and model.readout.travelling
    return 0 if first in ("stem", "position", "registers") or travels else model.config.depth + 1


def param_groups(model: nn.Module, weight_decay: float, layer_decay: float | None = None) -> ParamGroups:
    """Group parameters by weight decay and learning-rate scale.

    Parameters that are marked `_no_weight_decay` (LayerScale, class token, positions) or have one dimension take
    no decay. With `layer_decay` d, the learning rate of layer l of L + 1 is scaled by d^(L + 1 - l).

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
    groups: dict[tuple[float, str], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        reason = why_no_decay(parameter)
        scale = 1.0
        if layer_decay is not None:
            last = layer_of(model, "head")
            scale = layer_decay ** (last - layer_of(model, name))
        group = groups.setdefault(
            (scale, reason or ""),
            {
                "params": [],
                "names": [],
                "weight_decay": 0.0 if reason else weight_decay,
                "lr_scale": scale,
                "why": reason or "a matrix",
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return ParamGroups(groups.values())
