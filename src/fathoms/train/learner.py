"""What trains, around the model: shards or copies, precision, compiler, average, optimizer, scaler."""

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
from fathoms.train.precision.compile import compile_blocks, keep_lean
from fathoms.train.precision.master_weights import WorkingCopy
from fathoms.train.precision.policy import compile_options, sums_for


class Learner(NamedTuple):
    """A model and what trains it; `student` is what is called, the model in everything that stands around it."""

    model: nn.Module
    student: nn.Module
    copies: WorkingCopy | None
    ema: Ema | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def wrap(job: Job, world: World, model: nn.Module, objective: Objective) -> Learner:
    """Put what trains around the model, in the order that each needs."""
    recipe = job.recipe
    ema = Ema(model, recipe.model_ema_decay, recipe.model_ema_warmup) if recipe.model_ema else None
    student: nn.Module = objective.student
    if job.run.fsdp:
        if world.size == 1:
            raise ConfigError("--fsdp shards over several processes; start them with torchrun")
        # A wrapper calls the parts of blocks and not the blocks, so it is sharded as one.
        shard(student, by_block=student is model)
        if ema is not None:
            shard(ema.module)
    copies = None
    if recipe.policy == "bf16":
        if job.run.fsdp:
            raise ConfigError("--precision bf16 copies whole weights; with --fsdp use autocast")
        copies = WorkingCopy(student)
        student = copies.module
    how: dict[str, Any] = {}
    if recipe.torchcompile is not None:
        keep_lean()
        how = compile_options(recipe.torchcompile, sums_for(recipe.launch, recipe.torchcompile))
    if recipe.torchcompile is not None and recipe.compile_scope == "blocks":
        compile_blocks(student, **how)
    if world.size > 1 and not job.run.fsdp:
        ids = [world.device.index] if world.device.type == "cuda" else None
        student = nn.parallel.DistributedDataParallel(student, device_ids=ids)
    if recipe.torchcompile is not None and recipe.compile_scope != "blocks":
        student = cast(nn.Module, torch.compile(student, **how))
    groups = param_groups(model, recipe.weight_decay, recipe.layer_decay)
    own = {"momentum": recipe.momentum, "betas": recipe.opt_betas, "eps": recipe.opt_eps}
    optimizer = build_optimizer(groups, recipe.opt, lr=recipe.lr, **own)
    half = recipe.policy != "fp32" and recipe.amp_dtype == "float16"
    scaler = torch.amp.GradScaler(world.device.type, enabled=half)
    return Learner(model, student, copies, ema, optimizer, scaler)
