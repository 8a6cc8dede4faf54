"""What timm's arguments in a checkpoint change of its named model, as fields of ViTConfig. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathoms.errors import WeightsError
from fathoms.models.config import ViTConfig

_FIELDS = {
    "num_heads": "heads",
    "patch_size": "patch_size",
    "embed_dim": "dim",
    "depth": "depth",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "in_chans": "in_channels",
}
"""timm's names of fields."""
_IDLE = frozenset(
    [
        *(
            "drop_rate",
            "pos_drop_rate",
            "patch_drop_rate",
            "proj_drop_rate",
            "attn_drop_rate",
            "drop_path_rate",
        ),
        *("weight_init", "fix_init", "num_classes", "img_size", "dynamic_img_size"),
    ]
)
"""Arguments that act in training only, and those that the shapes of the weights tell."""
# Values that change nothing, as they are those of every model here that timm knows.
_PLAIN: dict[str, Any] = {
    "act_layer": "gelu",
    "pos_embed": "learn",
    "pre_norm": False,
    "final_norm": True,
    "qk_norm": False,
    "proj_bias": True,
    "reg_tokens": 0,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "pool_include_prefix": False,
}


def changed_by(arguments: Mapping[str, Any], config: ViTConfig | None, where: str) -> dict[str, Any]:
    """The fields that recorded arguments change; one that cannot be expressed is an error that names it.

    Args:
        arguments: Of timm's `model_kwargs`, and `gp` as `global_pool`.
        config: That of the named model; None of a name that is none here, whose arguments say nothing then.
        where: The file.
    """
    changes: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _IDLE or (value is None and name != "init_values"):
            continue
        if name in _PLAIN and type(value) is type(_PLAIN[name]) and value == _PLAIN[name]:
            continue
        found = None if config is None else _field(name, value, config, arguments)
        if found is None:
            raise WeightsError(
                f"{where}: was trained with {name}={str(value)[:40]}, which cannot be taken over here; `fathoms "
                "convert` gives the tensors alone"
            )
        changes |= found
    known = {} if config is None else config.to_dict()
    return {name: value for name, value in changes.items() if known[name] != value}


def _field(name: str, value: Any, config: ViTConfig, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields that say what an argument says; None where none do."""
    if name in _FIELDS:
        return {_FIELDS[name]: float(value) if name == "mlp_ratio" and type(value) is int else value}
    pooled = arguments.get("global_pool") or "token"
    with_cls = config.readout in ("cls", "class_attention")
    if (name, value) in (("global_pool", "token"), ("class_token", True)) and with_cls:
        return {}
    if name == "fc_norm" and value is (pooled == "avg"):
        return {}
    averages = config.readout == "cls" and not config.distill_token
    if (name, value) == ("global_pool", "avg") and averages and arguments.get("fc_norm") in (None, True):
        return {"readout": "mean_cls"}
    if (
        name == "init_values"
        and type(value) in (int, float)
        and value
        and config.residual in ("none", "layerscale")
    ):
        return {"residual": "layerscale"}
    if name == "init_values" and not value and config.residual == "none":
        return {}
    if name == "no_embed_class" and value is not config.places_queries:
        return {}
    return None
