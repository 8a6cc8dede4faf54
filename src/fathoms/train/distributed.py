"""One process or many: who this is, and what the others have."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fathoms.errors import ConfigError, FathomsError, reason


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started; alone it is rank 0 of 1."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this process: "auto" takes a GPU where there is one; a missing one is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such kind of device; use auto, cpu or cuda") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {name}: this machine has no usable GPU; use --device cpu")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
        torch.cuda.set_device(device)
    return device


def join_world(device: str, timeout: float = 1800.0) -> World:
    """Join the group that torchrun has set up, or stand alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World(0, 1, choose_device(device))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = choose_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    if not dist.is_initialized():
        backend = "nccl" if own.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout)
        store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=limit))
        # torchrun keeps its store over a restart, with the addresses of the processes before it: without a
        # prefix a quick rank finds those and is refused.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        fresh = dist.PrefixStore(f"attempt_{attempt}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=limit)
    return World(rank, size, own)


def leave_world() -> None:
    """Take the group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exit_rank(code: int) -> NoReturn:
    """End this process, one of many, without taking its interpreter down.

    The group's threads live as long as anything refers to it, as FSDP does to the end. One that lets go of a
    tensor needs Python's lock, and while Python takes itself down whoever asks for it is ended on the spot. C++
    answers that with an abort, so that a run which has finished, or has saved after a signal, would end with -6.
    What Python does before that is done here too: threads end, then the handlers of atexit run.
    """
    threading._shutdown()  # pyrefly: ignore
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # Nobody may be there to read it any more, which must not change the code.
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def check_agreement(world: World, fingerprint: str, what: str = "another config or other data") -> None:
    """Refuse ranks that have something else than the first."""
    if world.size == 1:
        return
    seen = gather_objects(world, fingerprint)
    if len(set(seen)) > 1:
        odd = next(rank for rank, value in enumerate(seen) if value != seen[0])
        raise FathomsError(f"rank {odd} has {what} than rank 0; start all ranks alike")


def gather_objects(world: World, mine: Any) -> list[Any]:
    """What every rank gives, in order of rank; all must ask."""
    seen: list[Any] = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(seen, mine)
    return seen


# What a lost connection says of itself: torch raises these as plain RuntimeErrors.
_LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "store")


@contextmanager
def naming_lost_ranks(world: World) -> Iterator[None]:
    """Say in one line that another process has gone, instead of torch's many."""
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)
        if world.size == 1 or not known:
            raise
        raise FathomsError(
            f"rank {world.rank}: another process of this run has gone or does not answer ({reason(error)}); "
            "give the same command again, or let torchrun --max-restarts do so"
        ) from error


@contextmanager
def together(world: World) -> Iterator[None]:
    """What one rank cannot do here, none goes on without: its error is raised on all of them."""
    mine: FathomsError | None = None
    try:
        yield
    except FathomsError as error:
        mine = error
    said = [reason for reason in gather_objects(world, None if mine is None else str(mine)) if reason]
    if mine is not None:
        raise mine
    if said:
        raise ConfigError(said[0])


def sum_over_ranks(world: World, values: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def shard(model: nn.Module, by_block: bool = True) -> None:
    """Shard a model's parameters over all ranks in place (FSDP2).

    Args:
        model: What is called in training; its own call gathers what is sharded.
        by_block: Gather one block at a time, which needs each block to be called as a module.
    """
    from torch.distributed.fsdp import fully_shard

    from fathoms.parts.block import Block
    from fathoms.parts.init import exempt_from_decay

    exempt = {name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}
    for module in model.modules():
        if by_block and isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    # Sharding puts new parameters in the place of the old ones, without their marks.
    for name, parameter in model.named_parameters():
        if name in exempt:
            exempt_from_decay(parameter)


def whole(value: Tensor) -> Tensor:
    """All of a tensor that may be spread over ranks; every rank must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, spread over ranks as `like` is."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
