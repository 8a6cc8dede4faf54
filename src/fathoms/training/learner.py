"""RunContext, the constants of a run; TrainState, its progress; Learner, the model and everything that trains it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError, WeightsError
from fathoms.models.param_groups import param_groups
from fathoms.models.weights import weights_of
from fathoms.training.build import Data
from fathoms.training.compiling import check_backend, compile_blocks, prepare_compiler
from fathoms.training.distributed import GradientMeans, World, shard
from fathoms.training.job import Job
from fathoms.training.master_weights import ComputeCopy
from fathoms.training.objective import Objective
from fathoms.training.optimization import build_optimizer
from fathoms.training.run_folder import RunFolder
from fathoms.training.speed import Speed


class RunContext(NamedTuple):
    """The constants of a run: its job, its ranks, its data and its folder."""

    job: Job
    world: World
    data: Data
    folder: RunFolder

    @property
    def batches_per_epoch(self) -> int:
        """Forward passes of one epoch on each rank."""
        return self.data.train.batches

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer updates of one epoch; the last may accumulate fewer batches."""
        return math.ceil(self.batches_per_epoch / self.job.recipe.grad_accum_steps)


@dataclass
class TrainState:
    """The counters of a run; a checkpoint keeps all of them."""

    sums: Tensor
    """Of this epoch on this rank, on the device: loss times images, top-1 hits, top-5 hits, images."""
    epoch: int = 0
    batch: int = 0
    """Batches done in this epoch."""
    updates: int = 0
    """Optimizer updates done in all epochs."""
    best: dict[str, Any] | None = None
    """The best evaluation so far, with its epoch."""
    last: dict[str, Any] | None = None
    """The last evaluation."""
    seconds: float = 0.0
    """Spent in training, without the evaluations."""
    peak_memory: int | None = None
    """Most bytes allocated on the GPU by any process of the run so far, as far as noted; None without one."""

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from the counters of a checkpoint; the sums are per rank and set apart."""
        for name in vars(self).keys() - {"sums"}:
            setattr(self, name, saved[name])

    def note_memory(self, device: torch.device) -> None:
        """Take this process's peak into the run's."""
        if device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(device))

    def next_epoch(self) -> None:
        self.epoch, self.batch = self.epoch + 1, 0
        self.sums.zero_()


# The warm-up's exponent: decay 0.999 is reached after 31,600 updates.
WARMUP_POWER = 2 / 3


class Ema:
    """Moving average of all parameters and buffers: average = decay * average + (1 - decay) * weights.

    Floating-point buffers are averaged, integer buffers are copied. The decay is a function of the number of updates
    alone, so a resumed run needs the averaged weights and nothing else. torch's AveragedModel reads its counter from
    the device at every update; this does not wait for the device.

    Args:
        model: The model, without any wrapper; the average starts as a copy of it. FSDP2 cannot copy a sharded model:
            build this first, then shard `module` like the model.
        decay: Weight of the old average.
        warmup: Whether the decay rises with the number of updates u, as min(decay, 1 - u^(-2/3)).

    >>> ema = Ema(nn.Linear(3, 2), decay=0.9)
    >>> ema.update(nn.Linear(3, 2), updates=1)
    >>> sorted(ema.module.state_dict())
    ['bias', 'weight']
    """

    def __init__(self, model: nn.Module, decay: float = 0.9998, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        # Tables that are not saved depend on the image size, which may differ between the two.
        self._saved = set(self.module.state_dict())

    def decay_at(self, updates: int) -> float:
        """The decay of an update, from its number counted from 1; the first one copies the weights."""
        if updates <= 1:
            return 0.0
        return min(self.decay, 1 - updates**-WARMUP_POWER) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int, instead: Mapping[Tensor, Tensor] | None = None) -> None:
        """Move the average towards `model`, whose number of updates is `updates`.

        Args:
            model: The model that the average was built from.
            updates: Its number of updates.
            instead: By buffer of the model, the values to average where forward passes have moved it on since.
        """
        instead = {} if instead is None else instead
        ours, theirs = weights_of(self.module, self._saved), weights_of(model, self._saved)
        if ours.keys() != theirs.keys():
            odd = min(ours.keys() ^ theirs.keys())
            raise WeightsError(
                f"ema: {odd!r} is in one of the two models only; give the model that the average was built from"
            )
        averages, weights = [], []
        for name, average in ours.items():
            current = instead.get(theirs[name], theirs[name])
            if average.is_floating_point():
                averages.append(average)
                weights.append(current.to(average.dtype))
            else:
                average.copy_(current)
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay_at(updates))


class Learner(NamedTuple):
    """A model and what trains it."""

    model: nn.Module
    """The master weights: what the optimizer updates, and what is evaluated and saved."""
    compute_model: nn.Module
    """Runs the forward pass: the model or its bfloat16 copy, inside DDP and torch.compile."""
    compute_copy: ComputeCopy | None
    """The bfloat16 copy of the master weights under --precision bf16."""
    ema: Ema | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    speed: Speed
    """Precision, compilation and launch."""
    means: GradientMeans | None = None
    """Averages gradients over ranks instead of DDP: for a CUDA graph, and in float32 for a bfloat16 copy."""


def _computed(
    job: Job, world: World, model: nn.Module, objective: Objective, precision: str
) -> tuple[nn.Module, ComputeCopy | None]:
    """What runs the forward pass, sharded under --fsdp, and its bfloat16 copy."""
    compute_model = objective.model
    if not job.run.fsdp:
        copy = ComputeCopy(compute_model) if precision == "bf16" else None
        return compute_model if copy is None else copy.module, copy
    if world.size == 1:
        raise ConfigError("--fsdp shards over several ranks; start them with torchrun")
    # A wrapper calls the parts of blocks and not the blocks, so it is sharded as one.
    shard(compute_model, by_block=compute_model is model)
    return compute_model, None


def build_learner(job: Job, world: World, model: nn.Module, objective: Objective, speed: Speed) -> Learner:
    """Build what trains a model. The order matters.

    The EMA copies the model before it is sharded, DDP wraps what is called, and the compiler sees all of it.
    """
    recipe = job.recipe
    ema = Ema(model, recipe.model_ema_decay, recipe.model_ema_warmup) if recipe.model_ema else None
    compute_model, compute_copy = _computed(job, world, model, objective, speed.precision)
    if job.run.fsdp and ema is not None:
        shard(ema.module)
    options: dict[str, Any] = {}
    if speed.compiles:
        check_backend(speed.torchcompile)
        prepare_compiler()
        options = {"backend": speed.torchcompile, "dynamic": False}
    if speed.compiles and speed.compile_scope == "blocks":
        compile_blocks(compute_model, **options)
    averaged: GradientMeans | None = None
    if world.size > 1 and not job.run.fsdp and (compute_copy is not None or speed.launch == "graph"):
        averaged = GradientMeans(model, world.size)
    elif world.size > 1 and not job.run.fsdp:
        ids = [world.device.index] if world.device.type == "cuda" else None
        compute_model = nn.parallel.DistributedDataParallel(compute_model, device_ids=ids)
    if speed.compiles and speed.compile_scope != "blocks":
        compute_model = cast(nn.Module, torch.compile(compute_model, **options))
    groups = param_groups(model, recipe.weight_decay, recipe.layer_decay)
    own = {"momentum": recipe.momentum, "betas": recipe.opt_betas, "eps": recipe.opt_eps}
    optimizer = build_optimizer(groups, recipe.opt, lr=recipe.lr, **own)
    half = speed.precision != "fp32" and recipe.amp_dtype == "float16"
    scaler = torch.amp.GradScaler(world.device.type, enabled=half)
    return Learner(model, compute_model, compute_copy, ema, optimizer, scaler, speed, averaged)
