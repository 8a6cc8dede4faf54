"""Migrate state.json of older checkpoints to the current version, and refuse newer ones.

A release that changes state.json raises VERSION, adds a function here, and a golden checkpoint in tests/golden.
"""

from __future__ import annotations

from typing import Any

from fathoms.errors import WeightsError
from fathoms.train.guard.policy import GUARD_COUNTS

VERSION = 5
RENAMED_IN_3 = {"step": "batch", "steps": "batches_per_epoch"}
"""Until version 2 a batch was called a step, as an optimizer update is."""


def check_version(version: Any, where: str) -> int:
    """The version of a state.json that this release can read; any other is an error with what to do."""
    if isinstance(version, int) and version > VERSION:
        raise WeightsError(
            f"{where}: written by a newer fathoms (version {version}, this one reads up to {VERSION}); "
            "install that fathoms, or start a new run with another --experiment"
        )
    if not isinstance(version, int) or version not in range(1, VERSION + 1):
        raise WeightsError(f"{where}: unknown checkpoint version {version!r}; remove the folder")
    return version


def migrate(state: dict[str, Any], where: str) -> dict[str, Any]:
    """A validated state.json in the form of the current version."""
    version = check_version(state.get("version"), where)
    if version < 2:
        state = _from_1(state)
    if version < 3:
        state = {RENAMED_IN_3.get(key, key): value for key, value in state.items()}
    if version < 4:
        state = {**state, "speed": speed_before_4(state["identity"]["recipe"]), "device": None}
    if version < 5:
        # What came before is not known; the last evaluation has no epoch then.
        state = {**state, "peak_memory": None, "bad_images": {}}
    return {**state, "version": VERSION}


def speed_before_4(recipe: dict[str, Any]) -> dict[str, str]:
    """Speed of a recipe from the time when they were not chosen by the device: float32 and eager by default."""
    backend = recipe.get("torchcompile")
    return {
        "precision": recipe.get("precision") or ("autocast" if recipe.get("amp") else "fp32"),
        "torchcompile": backend or "none",
        "compile_scope": recipe.get("compile_scope") or "model",
        "launch": recipe.get("launch") or "eager",
    }


def _from_1(state: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew neither the guard's counters nor the number of ranks.

    It wrote the defaults of momentum and crop_pct as 0.9; they are None now.
    """
    counts = dict.fromkeys(GUARD_COUNTS, 0)
    identity = state.get("identity", {})
    recipe = dict(identity.get("recipe", {}))
    for name in ("momentum", "crop_pct"):
        if recipe.get(name) == 0.9:
            recipe[name] = None
    state = {**state, "identity": {**identity, "recipe": recipe}, "sums": [state["sums"]]}
    return {**state, "world": None, "steps": None, "guard": {**counts, "passed_over": [], "losses": []}}
