"""Speed: precision, compilation and launch of a run, chosen from what was asked for and the device alone.

The choice never looks at caches, free memory or a clock, so the same command makes the same choice on every such
device.
"""

from __future__ import annotations

from dataclasses import dataclass

from fathoms.errors import ConfigError
from fathoms.models.config import ViTConfig
from fathoms.train.job import Job

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
        """Whether anything is compiled."""
        return self.torchcompile != "none"


@dataclass(frozen=True)
class Machine:
    """The device, as far as the choice depends on it.

    Args:
        kind: "cpu", "cuda" or another kind of device of torch.
        name: Its name, such as "NVIDIA H200".
        capability: Compute capability of a CUDA GPU; None of others, ROCm's among them.
        no_compiler: Why torch.compile cannot generate code for it here; None if it can.
        ranks: Number of ranks.
    """

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
        """The line that a run prints."""
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
    scope, scope_asked = compile_scope(job)
    # Under bf16 each rank computes with a whole copy; else a batch gathers the shards, block by block.
    gathers = job.run.fsdp and precision != "bf16"
    backend, of_compile = _backend(job, machine, scope, batches, gathers)
    if backend == "none" and scope_asked:
        raise ConfigError(
            f"--compile-scope {scope}: nothing is compiled ({of_compile}); add --torchcompile inductor"
        )
    launch, of_launch = _launch(job, machine, gathers)
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
    # Whoever shards is short of memory, which a whole copy on each rank takes.
    return "--fsdp" if job.run.fsdp else "a foreign model" if job.config is None else None


def compile_scope(job: Job) -> tuple[str, bool]:
    """Scope of compilation, and whether it was asked for."""
    if job.recipe.compile_scope != "auto":
        return job.recipe.compile_scope, True
    penalised = bool(job.recipe.train_feature_decay or job.recipe.attn_extra_loss)
    # The penalties run the parts of a block and not the block; foreign models have blocks of other kinds, or none.
    return "model" if penalised or job.config is None else "blocks", False


def _backend(job: Job, machine: Machine, scope: str, batches: int, gathers: bool) -> tuple[str, str | None]:
    asked = job.recipe.torchcompile
    if asked != "auto":
        return asked, "as asked"
    if reason := machine.why_conservative():
        return "none", reason
    if machine.no_compiler is not None:
        return "none", machine.no_compiler
    if gathers:
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
    work = training_operations(job.config) * batches * job.recipe.batch_size
    return work / EAGER_RATE >= PAYS_AFTER[scope]


def training_operations(config: ViTConfig) -> float:
    """Operations of a forward and backward pass of one image, those of matrix products alone.

    >>> round(training_operations(ViTConfig(dim=384, heads=6, depth=12)) / 1e9)
    28
    """
    tokens = config.grid**2 + config.registers + (config.queries if config.readout == "cls" else 0)
    matrices = tokens * config.dim**2 * (4 + 2 * config.mlp_ratio * (1.5 if config.mlp == "swiglu" else 1))
    stem = config.grid**2 * config.dim * config.in_channels * config.patch_size**2
    maps = 2 * tokens**2 * config.dim
    # Two operations for each product, and a backward pass is two forward passes.
    return 6.0 * (config.depth * (matrices + maps) + stem)


def _launch(job: Job, machine: Machine, gathers: bool) -> tuple[str, str | None]:
    recipe = job.recipe
    if recipe.launch == "graph":
        if machine.kind != "cuda":
            raise ConfigError("--launch graph: needs a CUDA device; use eager")
        if gathers:
            raise ConfigError(
                "--launch graph: with --fsdp a graph needs --precision bf16, under which a batch gathers no shards"
            )
    if recipe.launch != "auto":
        return recipe.launch, "as asked"
    if reason := machine.why_conservative() or _why_not_captured(job, machine):
        return "eager", reason
    if gathers:
        return "eager", "--fsdp"
    return "graph", None


def _why_not_captured(job: Job, machine: Machine) -> str | None:
    """Why a batch is not replayed as a graph: what might wait for the device, change its shapes or its addresses."""
    recipe = job.recipe
    reasons = {
        f"{machine.ranks} ranks": machine.ranks > 1,
        "a foreign model": job.config is None,
        "--teacher": recipe.teacher is not None,
        "--progressive-size": recipe.progressive_size is not None,
        "--grad-checkpointing": recipe.grad_checkpointing,
        "--amp-dtype float16": recipe.amp_dtype != "bfloat16",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
