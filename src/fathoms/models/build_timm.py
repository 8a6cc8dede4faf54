"""timm's models, from the extra."""

from __future__ import annotations

from typing import Any

from torch import nn

from fathoms.errors import ConfigError
from fathoms.ops.softmax import leave_out_cudnn_attention
from fathoms.registry import check_name
from fathoms.train.job import TIMM


def _timm(name: str, flag: str = "--model") -> Any:
    """The package, with the model's name checked."""
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            f"{flag} {name}: timm's models need an extra; pip install 'fathoms[timm]'"
        ) from error
    check_name(name.removeprefix(TIMM).partition(".")[0], timm.list_models(), "timm model", flag)
    return timm


def build_timm(
    name: str,
    classes: int,
    grad_checkpointing: bool = False,
    *,
    flag: str = "--model",
    cudnn_attention: bool = False,
) -> nn.Module:
    """One of timm's models, untrained.

    Without `cudnn_attention` the process is kept off the attention kernel whose gradients may be NaN; a benchmark
    leaves torch its choice.
    """
    if not cudnn_attention:
        leave_out_cudnn_attention()
    model = _timm(name, flag).create_model(name.removeprefix(TIMM), num_classes=classes)
    if grad_checkpointing:
        model.set_grad_checkpointing()
    return model


def timm_size(name: str) -> int:
    """Side of the images that one of timm's models takes."""
    config = _timm(name).get_pretrained_cfg(name.removeprefix(TIMM), allow_unregistered=False)
    return 224 if config is None else int(config.input_size[-1])


def timm_teacher(name: str, classes: int) -> tuple[nn.Module, tuple[float, ...], tuple[float, ...]]:
    """One of timm's pretrained models, and what its images are normalised with."""
    model = _timm(name, "--teacher").create_model(name.removeprefix(TIMM), pretrained=True)
    if model.num_classes != classes:
        raise ConfigError(f"--teacher {name}: it knows {model.num_classes} classes, the data has {classes}")
    config = model.pretrained_cfg
    return model, tuple(config["mean"]), tuple(config["std"])
