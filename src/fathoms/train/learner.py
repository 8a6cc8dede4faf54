"""Learner: the model and everything that trains it (EMA, FSDP or DDP, bf16 copy, compiler, optimizer, scaler)."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.param_groups import param_groups
from fathoms.train.distributed import World, shard
from fathoms.train.job import Job
from fathoms.train.objective.objective import Objective
from fathoms.train.optim.build import build_optimizer
from fathoms.train.optim.ema import Ema
from fathoms.train.precision.compile import check_backend, compile_blocks, prepare_compiler
from fathoms.train.precision.gradient_buckets import GradientBuckets
from fathoms.train.precision.master_weights import ComputeCopy
from fathoms.train.precision.sharded_masters import ShardedCopy, ShardedMasters, replica_of
from fathoms.train.precision.speed import Speed


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
    buckets: GradientBuckets | ShardedMasters | None = None
    """Averages gradients over ranks instead of DDP: for a CUDA graph, and in float32 for a bfloat16 copy."""


def _computed(
    job: Job, world: World, model: nn.Module, objective: Objective, precision: str
) -> tuple[nn.Module, ComputeCopy | None, ShardedMasters | None]:
    """Shard the model under --fsdp; what runs the forward pass, its bfloat16 copy, and what moves between shards."""
    compute_model = objective.model
    if not job.run.fsdp:
        copy = ComputeCopy(compute_model) if precision == "bf16" else None
        return compute_model if copy is None else copy.module, copy, None
    if world.size == 1:
        raise ConfigError("--fsdp shards over several ranks; start them with torchrun")
    if precision != "bf16":
        # A wrapper calls the parts of blocks and not the blocks, so it is sharded as one.
        shard(compute_model, by_block=compute_model is model)
        return compute_model, None, None
    replica = replica_of(compute_model)
    # No backward pass follows that would free what the forward pass of an evaluation has gathered.
    shard(model, free_root=True)
    masters = ShardedMasters(compute_model, replica, world.size)
    sharded = ShardedCopy(replica, masters)
    return sharded.module, sharded, masters


def build_learner(job: Job, world: World, model: nn.Module, objective: Objective, speed: Speed) -> Learner:
    """Build what trains a model. The order matters.

    The EMA copies the model before it is sharded, DDP wraps what is called, and the compiler sees all of it.
    """
    recipe = job.recipe
    ema = Ema(model, recipe.model_ema_decay, recipe.model_ema_warmup) if recipe.model_ema else None
    compute_model, compute_copy, masters = _computed(job, world, model, objective, speed.precision)
    if job.run.fsdp and ema is not None:
        shard(ema.module)
    options: dict[str, Any] = {}
    if speed.compiles:
        check_backend(speed.torchcompile)
        prepare_compiler()
        options = {"backend": speed.torchcompile, "dynamic": False}
    if speed.compiles and speed.compile_scope == "blocks":
        compile_blocks(compute_model, **options)
    averaged: GradientBuckets | ShardedMasters | None = masters
    if world.size > 1 and not job.run.fsdp and (compute_copy is not None or speed.launch == "graph"):
        averaged = GradientBuckets(model, world.size)
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
