"""Build timm models. Needs the optional dependency: pip install 'fathoms[timm]'.

Importing this file imports neither torch nor timm, so that the command line can tell a timm name quickly.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fathoms.errors import ConfigError, UnknownNameError, flag_of, reason
from fathoms.machine import hub_or_cache
from fathoms.registry import check_name

if TYPE_CHECKING:
    from torch import nn

TIMM = "timm/"
"""Prefix of the names of timm models."""
_ALIKE = 0.8


def _timm(name: str, flag: str = "--model") -> Any:
    """The timm package, after checking that it has a model of this name, with or without a pretrained tag."""
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            f"{flag} {name}: timm models need an optional dependency; pip install 'fathoms[timm]'"
        ) from error
    plain = name.removeprefix(TIMM)
    known = timm.list_models(include_tags="." in plain)
    if plain not in known and (near := _begins_like(plain, known)):
        raise UnknownNameError(f"{flag}: no timm model is called {plain[:80]!r}; did you mean {near!r}?")
    check_name(plain, known, "timm model", flag)
    return timm


def _begins_like(name: str, known: Sequence[str]) -> str:
    """The shortest model whose name begins most like this one: timm's end in patches and sizes; "" if none does."""
    name = name[:80].lower()

    def alike(model: str) -> float:
        return difflib.SequenceMatcher(None, name, model[: len(name)]).ratio()

    best = max(known, key=lambda model: (round(alike(model), 3), -len(model)), default="")
    return best if best and alike(best) >= _ALIKE else ""


def build_timm(
    name: str,
    classes: int | None,
    grad_checkpointing: bool = False,
    *,
    flag: str = "--model",
    cudnn_attention: bool = False,
) -> nn.Module:
    """A timm model with random weights.

    Args:
        name: "timm/NAME".
        classes: Number of outputs; None keeps timm's own.
        grad_checkpointing: Recompute activations in the backward pass.
        flag: The flag that errors name.
        cudnn_attention: Leave torch the choice of the cuDNN attention kernel, whose gradients may be NaN; for
            benchmarks.
    """
    if not cudnn_attention:
        from fathoms.ops.attention_ops import leave_out_cudnn_attention

        leave_out_cudnn_attention()
    outputs = {} if classes is None else {"num_classes": classes}
    model = _timm(name, flag).create_model(name.removeprefix(TIMM), **outputs)
    if grad_checkpointing:
        model.set_grad_checkpointing()
    return model


def timm_classes(switches: Mapping[str, Any]) -> Any:
    """The number of outputs among the switches of a timm model; any other switch is refused."""
    for option in switches.keys() - {"num_classes"}:
        raise ConfigError(f"{flag_of(option)}: a timm model is built as its name says; leave it out")
    return switches.get("num_classes")


def timm_size(name: str) -> int:
    """Side of the images that a timm model takes, in pixels."""
    config = _timm(name).get_pretrained_cfg(name.removeprefix(TIMM), allow_unregistered=False)
    return 224 if config is None else int(config.input_size[-1])


def timm_preprocessing(name: str) -> dict[str, Any]:
    """Crop, interpolation, mean and std that timm evaluates a model with; empty where timm does not say."""
    config = _timm(name).get_pretrained_cfg(name.removeprefix(TIMM), allow_unregistered=False)
    known = ("crop_pct", "interpolation", "mean", "std")
    return {key: getattr(config, key) for key in known if getattr(config, key, None) is not None}


def timm_teacher(name: str, classes: int) -> tuple[nn.Module, tuple[float, ...], tuple[float, ...]]:
    """A pretrained timm model, with the mean and standard deviation its images are normalised with."""
    timm = _timm(name, "--teacher")
    with hub_or_cache() as online:
        try:
            model = timm.create_model(name.removeprefix(TIMM), pretrained=True)
        # timm downloads with several clients, each with its own errors.
        except Exception as error:
            fault = (
                reason(error) if online else "the Hub cannot be reached, and the local cache does not hold it"
            )
            raise ConfigError(
                f"--teacher {name}: no pretrained weights ({fault}); give --teacher NAME=WEIGHTS.safetensors"
            ) from error
    if model.num_classes != classes:
        raise ConfigError(f"--teacher {name}: has {model.num_classes} classes, the data has {classes}")
    config = model.pretrained_cfg
    return model, tuple(config["mean"]), tuple(config["std"])
