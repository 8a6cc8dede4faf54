"""Names of models in a recipe and a run: the teacher and the weights to start from. Does not import torch."""

from __future__ import annotations

import os

from fathoms.errors import ConfigError
from fathoms.models.resolve import resolve, resolve_weights
from fathoms.models.zoo import ALIASES, MODELS
from fathoms.names.registry import check_name


def teacher_kind(teacher: str) -> str:
    """The kind of a teacher: "weights" for NAME=WEIGHTS, "timm", "path" or "hub"; anything else is an error."""
    name, equals, weights = teacher.partition("=")
    if os.path.exists(teacher):  # noqa: PTH110 - the name of a run folder may have an equals sign in it
        return "path"
    if weights:
        check_name(name, [*MODELS, *ALIASES], "model", "--teacher")
        resolve_weights(weights, f"--teacher {name}=")
        return "weights"
    found = resolve(name, "--teacher")
    if equals or found.kind == "zoo":
        raise ConfigError(
            f"--teacher {name}: an untrained teacher teaches noise; give --teacher {name}=WEIGHTS.safetensors"
        )
    return found.kind
