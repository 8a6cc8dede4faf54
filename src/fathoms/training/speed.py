"""Speed: precision, compilation and launch of a run, chosen from what was asked for and the device alone.

| precision | matrix products | residual stream | weights |
|---|---|---|---|
| fp32 | float32 | float32 | float32 |
| autocast_fp32_stream | the dtype of --amp-dtype | float32 | float32, cast at every use |
| autocast | the dtype of --amp-dtype | the same | float32, cast at every use |
| bf16 | bfloat16 | bfloat16 | float32 master weights, cast once per update |

Norms, scales and tokens stay float32 under every policy, and statistics are always in float32. The choice never looks
at caches, free memory or a clock, so the same command makes the same choice on every such device. Importing this file
does not import torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.errors import ConfigError
from fathoms.registry import check_name
from fathoms.training.job import Job

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fathoms.training.distributed import World

PRECISIONS = ("fp32", "autocast_fp32_stream", "autocast", "bf16")
SCOPES = ("model", "blocks")
LAUNCHES = ("eager", "graph")
# Compute capabilities with bfloat16 matrix units for which torch and Triton generate code.
KNOWN_CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
BF16_SINCE = (8, 0)
# Operations a second that a GPU reaches in training without compilation, in bfloat16. A rough number for a rough
# question, whether a run is longer than its compilation; the same for all GPUs, which spread over a factor of ten.
EAGER_RATE = 5e13
PAYS_AFTER = {"blocks": 10.0, "model": 100.0}
"""Seconds that training must take without compilation for compilation to pay: minutes for a whole deep model."""
PAYS_AFTER_BATCHES = 1000
"""The same for foreign models, whose operations are not counted, in batches."""


@dataclass(frozen=True)
class Speed:
    """Precision policy, torch.compile backend or "none", what is compiled, and how kernels are launched."""

    precision: str = "fp32"
    torchcompile: str = "none"
    compile_scope: str = "model"
    launch: str = "eager"

    @property
    def compiles(self) -> bool:
        return self.torchcompile != "none"


@dataclass(frozen=True)
class Machine:
    """The device, as far as the choice depends on it."""

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    no_compiler: str | None = None
    ranks: int = 1

    def why_conservative(self) -> str | None:
        """Why nothing is chosen for this device that was not asked for; None for GPUs that are known."""
        if self.kind != "cuda":
            return f"on {'a CPU' if self.kind == 'cpu' else self.kind}"
        if self.capability is not None and self.capability < BF16_SINCE:
            return "this GPU has no bfloat16 matrix units"
        return None if self.capability in KNOWN_CAPABILITIES else "this kind of GPU is not known"


@dataclass(frozen=True)
class Choice:
    """A Speed, and the reason of each part that is not the fastest: of its precision, compilation and launch."""

    speed: Speed
    reasons: tuple[str | None, str | None, str | None]

    def describe(self, machine: Machine) -> str:
        speed = self.speed
        compiled = "not compiled"
        if speed.compiles:
            what = "blocks" if speed.compile_scope == "blocks" else "whole model"
            compiled = f"{what} compiled by {speed.torchcompile}"
        launched = "CUDA graph" if speed.launch == "graph" else "kernels launched one by one"
        if len(set(self.reasons)) == 1 and self.reasons[0] is not None:
            return f"speed: {speed.precision}, {compiled}, {launched}: {self.reasons[0]}"
        parts = zip((speed.precision, compiled, launched), self.reasons, strict=True)
        said = (part if reason is None else f"{part} ({reason})" for part, reason in parts)
        return f"speed: {', '.join(said)}; chosen for {machine.name}"


def choose(job: Job, machine: Machine, batches: int) -> Choice:
    """Precision, compilation and launch of a run of `batches` forward passes on each rank.

    What was asked for is taken; the rest is the fastest that is correct and known to work for this job on this
    machine. What cannot work is refused here, before anything is built.
    """
    precision, of_precision = _precision(job, machine)
    if job.run.fsdp and precision == "bf16":
        raise ConfigError(
            "--precision bf16: --fsdp shards float32 weights, not a bfloat16 copy; use autocast"
        )
    scope = compile_scope(job)
    backend, of_compile = _backend(job, machine, scope, batches)
    of_launch = machine.why_conservative() or _why_not_captured(job, machine)
    launch = "graph" if of_launch is None else "eager"
    speed = Speed(precision, backend, scope if backend != "none" else "model", launch)
    return Choice(speed, (of_precision, of_compile, of_launch))


def _precision(job: Job, machine: Machine) -> tuple[str, str | None]:
    recipe = job.recipe
    if recipe.precision != "auto":
        return recipe.precision, "as asked"
    if recipe.amp is False:
        return "fp32", "--no-amp"
    if reason := machine.why_conservative():
        return ("autocast", f"--amp {reason}") if recipe.amp else ("fp32", reason)
    if reason := _why_not_absorbed(job):
        return "autocast", reason
    return "bf16", None


def _why_not_absorbed(job: Job) -> str | None:
    """Why the weights are not kept in bfloat16 between updates."""
    if job.recipe.amp_dtype != "bfloat16":
        return f"--amp-dtype {job.recipe.amp_dtype}"
    return "--fsdp" if job.run.fsdp else "a foreign model" if job.config is None else None


def compile_scope(job: Job) -> str:
    """Scope of compilation: each block, which compiles faster, or the whole model.

    The penalties run the parts of a block and not the block; foreign models have blocks of other kinds, or none.
    """
    penalised = bool(job.recipe.train_feature_decay or job.recipe.attn_extra_loss)
    return "model" if penalised or job.config is None else "blocks"


def _backend(job: Job, machine: Machine, scope: str, batches: int) -> tuple[str, str | None]:
    asked = job.recipe.torchcompile
    if asked != "auto":
        return asked, "as asked"
    if reason := machine.why_conservative():
        return "none", reason
    if machine.no_compiler is not None:
        return "none", machine.no_compiler
    if job.run.fsdp:
        return "none", "--fsdp"
    if not _pays(job, scope, batches):
        return "none", "the run is too short for it to pay"
    return (
        "inductor",
        None if scope == "blocks" else "nothing less can be" if job.config else "a foreign model",
    )


def _pays(job: Job, scope: str, batches: int) -> bool:
    if job.config is None:
        return batches >= PAYS_AFTER_BATCHES
    import torch

    from fathoms.models.vit import ViT

    with torch.device("meta"):
        products = ViT(job.config).flop_count()
    # Two operations for each product, and a backward pass is two forward passes.
    return 6.0 * products * batches * job.recipe.batch_size / EAGER_RATE >= PAYS_AFTER[scope]


def _why_not_captured(job: Job, machine: Machine) -> str | None:
    """Why a batch is not replayed as a graph: what might wait for the device, change its shapes or its addresses."""
    recipe = job.recipe
    reasons = {
        "--torchcompile none": recipe.torchcompile == "none",
        "--fsdp": job.run.fsdp,
        f"{machine.ranks} ranks": machine.ranks > 1,
        "a foreign model": job.config is None,
        "--teacher": recipe.teacher is not None,
        "--progressive-size": recipe.progressive_size is not None,
        "--grad-checkpointing": recipe.grad_checkpointing,
        "--amp-dtype float16": recipe.amp_dtype != "bfloat16",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def set_stream(model: nn.Module, precision: str) -> None:
    """Set the dtype of a model's residual stream to that of a policy."""
    import torch

    from fathoms.models.vit import ViT

    check_name(precision, PRECISIONS, "precision", "--precision")
    wide = precision == "autocast_fp32_stream"
    if isinstance(model, ViT):
        model.stream_dtype = torch.float32 if wide else None
    elif wide:
        raise ConfigError(
            "--precision autocast_fp32_stream: works on fathoms models only; use autocast, where timm models "
            "keep a float32 stream anyway"
        )


def machine_of(world: World) -> Machine:
    import torch

    device = world.device
    if device.type != "cuda":
        return Machine(device.type, device_name(device), ranks=world.size)
    # ROCm's GPUs report a capability too, with another meaning.
    capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
    return Machine("cuda", device_name(device), capability, why_no_compiler(), world.size)


def device_name(device: torch.device) -> str:
    """The name of a device, such as "NVIDIA H200" or "cpu"."""
    import torch

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
    choice = choose(job, machine, batches)
    if recorded is None or {"precision", "torchcompile"} & set(job.run.allow_change or ()):
        return choice.speed, [choice.describe(machine)]
    recipe, speed = job.recipe, choice.speed
    # Mixed precision that is asked for, or refused, against the record stays so.
    if recipe.precision == "auto" and recipe.amp in (None, recorded["precision"] != "fp32"):
        speed = replace(speed, precision=recorded["precision"])
    if recipe.torchcompile == "auto":
        scope = "model" if recorded["torchcompile"] == "none" else compile_scope(job)
        speed = replace(speed, torchcompile=recorded["torchcompile"], compile_scope=scope)
    lines = [Choice(speed, ("as its checkpoint records",) * 3).describe(machine)]
    if recorded["device"] not in (None, machine.name):
        lines.append(
            f"resumes on {machine.name} instead of {recorded['device']}: the same settings, but bits may differ"
        )
    return speed, lines
