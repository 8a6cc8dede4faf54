"""Parameter groups for an optimizer: weight decay, layer-wise learning-rate decay, transfer over depth and width."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.optimizer_facts import EPS, OptimizerName, state_values
from fathoms.parts.transfer import Multipliers, Transfer
from fathoms.text_table import aligned


class _Group(dict[str, Any]):
    """A group that torch's optimizers, which read no scales, refuse where they would pass one over."""

    def setdefault(self, key: str, default: Any = None) -> Any:
        """What an optimizer calls to give a group its own defaults."""
        scale = self.get(f"{key}_scale", 1.0)
        if key not in self and scale != 1.0:
            raise ConfigError(
                f"param_groups: a group has {key}_scale {scale:.3g}, which torch's optimizers do not read; give "
                "param_groups(..., lr=) the learning rate, or .at(lr)"
            )
        return super().setdefault(key, default)


class ParamGroups(list[dict[str, Any]]):
    """Groups for a torch optimizer, which reads `params`, `weight_decay`, and `lr` and `eps` where they are set.

    `lr_scale`, `eps_scale`, `width` and `names` are read by `fathoms.training`'s optimizers and timm's schedulers
    (`lr_scale`) alone, `why` by people. An optimizer of torch refuses a group with a scale and without the number.
    """

    def at(self, lr: float, eps: float = EPS) -> list[dict[str, Any]]:
        """The groups with a learning rate and an epsilon each, for an Adam of your own."""
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


TOKENS = frozenset(
    [
        "cls_token",
        "dist_token",
        "reg_token",
        "mask_token",
        "class_token",
        "register_tokens",
        "distillation_token",
        "pos_embed",
        "pos_embedding",
        "position_embeddings",
        "relative_position_bias_table",
    ]
)
"""Tokens and positions in ViTs of timm, torchvision and transformers, which their authors do not decay."""


def undecayed(model: nn.Module) -> dict[str, str]:
    """Each parameter that takes no weight decay, with the reason.

    A module names its own in `exempt_from_decay`, a model of timm in `no_weight_decay()`, where * stands for any text.
    A mark on the parameter, `_no_weight_decay`, is read too; copies of a model lose it.
    """
    owners = [(path, getattr(module, "exempt_from_decay", ())) for path, module in model.named_modules()]
    named = {f"{path}.{name}" if path else name for path, names in owners for name in names}
    of_timm = None if isinstance(model, ViT) else getattr(model, "no_weight_decay", None)
    patterns = list(of_timm()) if callable(of_timm) else []
    found = {}
    for name, parameter in model.named_parameters():
        if name in named or any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = "exempt from decay"
        elif getattr(parameter, "_no_weight_decay", False):
            found[name] = "marked _no_weight_decay"
        elif parameter.ndim <= 1:
            found[name] = "one-dimensional"
        elif not isinstance(model, ViT) and name.rpartition(".")[2] in TOKENS:
            found[name] = "a token or a position"
    return found


def layer_of(model: nn.Module, name: str) -> int:
    """The layer of a parameter for layer decay: 0 for the stem, 1 to L for the blocks, L + 1 for the head.

    As in timm, the final norm belongs to the last block, except after pooling, and the last n blocks of CaiT and the n
    of its class attention share their layers.
    """
    if not isinstance(model, ViT):
        raise ConfigError(
            f"param_groups: layer_decay knows the layers of fathoms models only, not of "
            f"{type(model).__name__}; leave it out"
        )
    first, _, rest = name.partition(".")
    depth, steps = model.config.depth, name.split(".")
    if first == "blocks":
        return int(steps[1]) + 1
    if first == "norm":
        return depth + (model.config.readout == "mean_cls")
    cait = model.config.readout == "class_attention"
    if cait and name.startswith("readout.blocks."):
        return max(int(steps[2]) + 1 + depth - model.config.class_attention_depth, 1)
    if first == "readout" and rest in ("queries", "positions", "distill"):
        # Queries that join late belong to the layer that they come after; those of class attention to the stem.
        return 0 if cait else model.readout.joins
    return 0 if first in ("stem", "position", "registers") else depth + 1


def _transfers(model: nn.Module) -> list[tuple[str, Transfer]]:
    """The rules of the ViTs in a model, each with what its parameters' names begin with; a wrapper has them inside."""
    found = [(name, part.transfer) for name, part in model.named_modules() if isinstance(part, ViT)]
    return [(f"{name}." if name else "", transfer) for name, transfer in found]


def _group(reason: str | None, rule: Multipliers, weight_decay: float, scale: float) -> dict[str, Any]:
    """An empty group for parameters like this one; `reason` is why they take no decay."""
    return _Group(
        params=[],
        names=[],
        weight_decay=0.0 if reason else weight_decay * rule.decay,
        lr_scale=scale * rule.lr,
        eps_scale=rule.eps,
        width=rule.width,
        why="; ".join(filter(None, (reason or "a matrix", rule.why))),
    )


def param_groups(
    model: nn.Module, weight_decay: float, layer_decay: float | None = None, *, lr: float | None = None
) -> ParamGroups:
    """Group parameters by weight decay, learning-rate scale and epsilon.

    Parameters that their module names in `exempt_from_decay` (LayerScale, class token, positions) or that have one
    dimension take no decay. With `layer_decay` d, the learning rate of layer l of L + 1 is scaled by d^(L + 1 - l).
    Residual methods that transfer over depth and width (completep) multiply all three by the rules of
    `fathoms.parts.transfer`. With the base learning rate `lr`, each group has a rate and an epsilon of its own, which
    any optimizer obeys; without it, one of torch refuses groups that need them.

    >>> from fathoms import create_model
    >>> groups = param_groups(create_model("vit_tiny_patch16_224"), weight_decay=0.05)
    >>> [group["weight_decay"] for group in groups]
    [0.05, 0.0, 0.0]
    """
    if not 0 <= weight_decay < math.inf or (layer_decay is not None and not 0 < layer_decay <= 1):
        raise ConfigError(
            f"param_groups: weight_decay={weight_decay}, layer_decay={layer_decay}; "
            "the first must be zero or more, the second in (0, 1]"
        )
    transfers, reasons = _transfers(model), undecayed(model)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0
        if layer_decay is not None:
            scale = layer_decay ** (layer_of(model, "head") - layer_of(model, name))
        prefix, transfer = next((each for each in transfers if name.startswith(each[0])), ("", Transfer()))
        rule = transfer.of(name.removeprefix(prefix), parameter.ndim)
        own = _group(reasons.get(name), rule, weight_decay, scale)
        # What differs between groups, in the order of their first parameters.
        kind = tuple(own[key] for key in ("lr_scale", "eps_scale", "width", "why"))
        group = groups.setdefault(kind, own)
        group["params"].append(parameter)
        group["names"].append(name)
    found = ParamGroups(groups.values())
    return found if lr is None else ParamGroups(found.at(lr))
