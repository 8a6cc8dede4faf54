"""Misfit between weights and a model: the settings of the model that the shapes of the weights contradict."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from fathoms.models.config import ViTConfig

Shapes = Mapping[str, tuple[int, ...]]


def settings_in(shapes: Shapes, in_channels: int) -> dict[str, Any]:
    """Settings that can be read off the names and shapes of weights under fathoms' names."""
    found: dict[str, Any] = {
        "depth": _count(shapes, r"blocks\.(\d+)\..*"),
        "registers": shapes.get("registers", (0,))[0],
        "distill_token": shapes.get("readout.queries", (0,))[:1] == (2,),
        "num_classes": shapes.get("head.weight", (0,))[0],
    }
    if _count(shapes, r"readout\.blocks\.(\d+)\..*"):
        found["readout"] = "class_attention"
        found["class_attention_depth"] = _count(shapes, r"readout\.blocks\.(\d+)\..*")
    stem = shapes.get("stem.proj.weight", ())
    if len(stem) == 2:
        found["dim"] = stem[0]
        side = math.isqrt(stem[1] // in_channels)
        if side * side * in_channels == stem[1]:
            found["patch_size"] = side
    return found


def _count(shapes: Shapes, pattern: str) -> int:
    numbers = [int(match[1]) for name in shapes if (match := re.fullmatch(pattern, name))]
    return 1 + max(numbers) if numbers else 0


def misfits(config: ViTConfig, shapes: Shapes, skipped: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, each with its value in the weights and in the model.

    Args:
        config: The model's.
        shapes: The weights', by fathoms' names.
        skipped: Parameters that are not loaded.
    """
    held = settings_in(shapes, config.in_channels)
    if "head.weight" in skipped:
        del held["num_classes"]
    own = config.to_dict()
    return {name: (value, own[name]) for name, value in held.items() if value != own[name]}
