"""The device that a choice of speed depends on, as torch reports it; and the speed that a run keeps when it resumes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fathoms.train.distributed import World
from fathoms.train.job import Job
from fathoms.train.precision.speed import Choice, Machine, Speed, choose


def machine_of(world: World) -> Machine:
    """The device of this rank."""
    device = world.device
    if device.type != "cuda":
        return Machine(device.type, device_name(device), ranks=world.size)
    # ROCm's GPUs report a capability too, with another meaning.
    capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
    return Machine("cuda", device_name(device), capability, why_no_compiler(), world.size)


def device_name(device: torch.device) -> str:
    """The name of a device, such as "NVIDIA H200" or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def why_no_compiler() -> str | None:
    """Why torch.compile would fail on a GPU at the first update; None if it would not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "cc", "clang")))):
        return "there is no C compiler for Triton"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's C headers are missing, which Triton needs"
    return None


def settle(
    job: Job, world: World, batches: int, recorded: Mapping[str, Any] | None
) -> tuple[Speed, list[str]]:
    """The speed of a run, and lines about it: chosen anew, or as recorded in the checkpoint that the run resumes from.

    What is asked for by name is taken either way; where it contradicts the record, resuming refuses it.
    """
    machine = machine_of(world)
    allowed = {"precision", "torchcompile", "compile_scope"} & set(job.run.allow_change or ())
    if recorded is None or allowed:
        choice = choose(job, machine, batches)
        return choice.speed, [choice.describe(machine)]
    choice = choose(_as_recorded(job, recorded, machine), machine, batches)
    kept = Choice(choice.speed, ("as its checkpoint records",) * 3)
    lines = [kept.describe(machine)]
    if recorded["device"] not in (None, machine.name):
        lines.append(
            f"resumes on {machine.name} instead of {recorded['device']}: the same settings, but bits may differ"
        )
    return choice.speed, lines


def _as_recorded(job: Job, recorded: Mapping[str, Any], machine: Machine) -> Job:
    """A job that asks for what was recorded wherever it says auto; a graph only where there can be one."""
    recipe = job.recipe
    changes: dict[str, Any] = {}
    # Mixed precision that is asked for, or refused, against the record stays so, and resuming refuses it.
    mixed = recorded["precision"] != "fp32"
    if recipe.precision == "auto" and recipe.amp in (None, mixed):
        changes["precision"] = recorded["precision"]
        # Whether to mix precisions has been decided.
        changes["amp"] = None
    for name in ("torchcompile", "compile_scope"):
        if getattr(recipe, name) == "auto":
            changes[name] = recorded[name]
    if changes.get("torchcompile", recipe.torchcompile) == "none":
        changes.pop("compile_scope", None)
    can_replay = machine.kind == "cuda" and machine.ranks == 1
    if recipe.launch == "auto":
        changes["launch"] = recorded["launch"] if can_replay else "eager"
    return replace(job, recipe=recipe.replace(**changes))
