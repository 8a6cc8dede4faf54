"""The identity of a run: what was asked for, and so decides its folder's name and whether it may be resumed.

An option that is newer than this file counts only where it differs from its default, so that a new release finds the
folders of an older one. What a device makes of `auto` is not part of it: see `fathoms.train.precision.speed`.
Importing this file does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fathoms.models.config import ViTConfig
from fathoms.train.recipe.recipe import DEFAULTS, Recipe

SPEED = ("amp", "precision", "torchcompile", "compile_scope", "launch")
"""Options whose result on this device is recorded beside the identity, and compared with the record."""


POLICY: dict[str, Any] = {"guard": "stop", "guard_limit": 5, "on_spike": "log", "spike_score": 10.0}
"""Defaults of the guard's policy, which decides what becomes of a run whose numbers are not finite or jump."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The options that were in every name from the start, at their defaults too.
_FIRST_RECIPE = _names(
    """
    epochs batch_size grad_accum_steps opt lr weight_decay opt_eps opt_betas momentum layer_decay clip_grad sched
    warmup_epochs warmup_lr warmup_prefix min_lr cooldown_epochs decay_epochs decay_rate epoch_factor epoch_threshold
    sched_on_updates smoothing bce_loss bce_sum bce_target_thresh mixup cutmix mixup_prob mixup_switch_prob mixup_mode
    aa color_jitter reprob remode recount aug_repeats crop crop_padding scale ratio val_share progressive_size hflip
    train_interpolation interpolation crop_pct mean std train_feature_decay attn_extra_loss attn_extra_loss_layers
    teacher distillation_type distillation_alpha distillation_tau model_ema model_ema_decay model_ema_warmup amp
    amp_dtype precision torchcompile compile_scope launch grad_checkpointing freeze
    """
)
_FIRST_CONFIG = _names(
    """
    image_size patch_size in_channels num_classes dim depth heads mlp_ratio norm norm_init final_norm norm_by_depth
    attn_placement mlp_placement residual residual_init stem_norm attention qk_norm qkv_bias position registers readout
    class_attention_depth distill_token mlp drop_path drop_path_schedule
    """
)


def recipe_identity(recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe that count; `auto` is None and "--amp not given" is False, as before there was auto."""
    asked = _counted(recipe.to_dict(), DEFAULTS, _FIRST_RECIPE)
    asked |= {name: None for name in SPEED if asked[name] == "auto"}
    if recipe.amp is False:
        asked["precision"] = "fp32"
    return {**asked, "amp": bool(recipe.amp)}


def config_identity(config: ViTConfig | None) -> dict[str, Any] | None:
    """The switches of a model that count; None for a foreign model."""
    return None if config is None else _counted(config.to_dict(), ViTConfig().to_dict(), _FIRST_CONFIG)


def policy_identity(run: Mapping[str, Any]) -> dict[str, Any]:
    """The guard's policy as far as it differs from the default and is read."""
    rolls_back = run["on_spike"] == "rollback"
    read = {
        "guard": True,
        "on_spike": True,
        "guard_limit": rolls_back or run["guard"] != "stop",
        "spike_score": rolls_back,
    }
    return {name: run[name] for name, default in POLICY.items() if read[name] and run[name] != default}


def _counted(values: Mapping[str, Any], defaults: Mapping[str, Any], first: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in first or value != defaults[name]}


def completed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with the options it leaves out at today's defaults, and without those of SPEED."""
    full = {**POLICY, **identity, "recipe": {**DEFAULTS, **identity["recipe"]}}
    full["recipe"] = {name: value for name, value in full["recipe"].items() if name not in SPEED}
    if identity["config"] is not None:
        full["config"] = {**ViTConfig().to_dict(), **identity["config"]}
    return full


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """The differences between two identities, one "name: old -> new" each."""
    changed: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += differences(old, new, f"{path}{key}.")
        elif json.dumps(old) != json.dumps(new):
            changed.append(f"{path}{key}: {old} -> {new}")
    return changed
