"""Ranks under torchrun: devices, collectives, gradients averaged over ranks; and the signals that end a run."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fathoms.errors import ConfigError, FathomsError, reason
from fathoms.machine import check_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Seconds that ranks wait for each other, as torch's own default for gloo.
_WAIT = 1800.0


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, and its device; without torchrun, rank 0 of 1."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this rank: "auto" is a GPU where there is one; a missing device is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(check_device(name))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {name}: this machine has no usable GPU; use --device cpu")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
        torch.cuda.set_device(device)
    return device


def join_world(device: str) -> World:
    """Join the process group of torchrun, or be rank 0 of 1."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World(0, 1, choose_device(device))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = choose_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    if not dist.is_initialized():
        backend = "nccl" if own.type == "cuda" else "gloo"
        limit = timedelta(seconds=_WAIT)
        store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=limit))
        # torchrun keeps its store over a restart, with the addresses of the previous processes: without a prefix
        # a fast rank finds those and is refused.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        fresh = dist.PrefixStore(f"attempt_{attempt}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=limit)
    return World(rank, size, own)


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def exit_rank(code: int) -> NoReturn:
    """Exit a process that may be one of several ranks without finalizing the interpreter, which also takes seconds.

    The process group's threads live as long as anything refers to it, as FSDP does to the end. One that frees a
    tensor needs the GIL, and while Python finalizes, a thread that asks for it is ended on the spot. C++ turns that
    into an abort, so that a run which has finished, or has saved after a signal, would exit with -6. What Python does
    before finalizing is done here too: threads are joined, then the atexit handlers run.
    """
    threading._shutdown()  # pyrefly: ignore
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # The reader may have gone, which must not change the exit code.
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def check_agreement(world: World, fingerprint: str, what: str = "another config or other data") -> None:
    """Refuse ranks whose fingerprint differs from rank 0's."""
    if world.size == 1:
        return
    seen = gather_objects(world, fingerprint)
    if len(set(seen)) > 1:
        odd = next(rank for rank, value in enumerate(seen) if value != seen[0])
        raise FathomsError(f"rank {odd} has {what} than rank 0; start all ranks alike")


def gather_objects(world: World, mine: Any) -> list[Any]:
    """The objects of all ranks, in order of rank; every rank must call this."""
    seen: list[Any] = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(seen, mine)
    return seen


# Words in the messages of a lost connection; torch raises them as plain RuntimeErrors.
_LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "store")


@contextmanager
def naming_lost_ranks(world: World) -> Iterator[None]:
    """Report a lost rank in one line instead of torch's many."""
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)
        if world.size == 1 or not known:
            raise
        raise FathomsError(
            f"rank {world.rank}: another rank of this run has died or does not respond ({reason(error)}); "
            "give the same command again, or let torchrun --max-restarts do so"
        ) from error


@contextmanager
def raise_on_all(world: World) -> Iterator[None]:
    """Run the block on every rank; if it fails on one, raise that error on all."""
    mine: FathomsError | None = None
    try:
        yield
    except FathomsError as error:
        mine = error
    reasons = [reason for reason in gather_objects(world, None if mine is None else str(mine)) if reason]
    if mine is not None:
        raise mine
    if reasons:
        raise ConfigError(reasons[0])


def sum_over_ranks(world: World, values: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def shard(model: nn.Module, by_block: bool = True) -> None:
    """Shard a model's parameters over all ranks in place (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    from fathoms.parts.block import Block

    for module in model.modules():
        if by_block and isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)


def is_sharded(value: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is sharded over ranks; nothing is before torch's module for that has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def own_part(value: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: all of it, unless it is sharded."""
    return value.to_local() if is_sharded(value) else value


def whole(value: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over ranks; every rank must call this."""
    return value.full_tensor() if is_sharded(value) else value


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded as `like` is; one of another shape is returned as it is."""
    if not is_sharded(like) or is_sharded(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def check_statistics(model: nn.Module) -> None:
    """Refuse a model whose statistics the ranks would have to share in the forward pass."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        raise ConfigError(
            "--precision, --launch: BatchNorm's statistics are shared over ranks under autocast and eager only; "
            "use --precision autocast --launch eager"
        )


class GradientMeans:
    """The gradients of a model's parameters, averaged over all ranks by `reduce`.

    They are summed as one vector in the order of the parameters, so results repeat. Every rank must give gradients to
    the same parameters.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        check_statistics(model)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.ranks = ranks

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace each gradient by its mean over the ranks; every rank must call this."""
        given = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in given):
            own = [gradient for gradient in given if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in own])
            dist.all_reduce(flat)
            parts = flat.div_(self.ranks).split([gradient.numel() for gradient in own])
            torch._foreach_copy_(own, [part.view_as(each) for part, each in zip(parts, own, strict=True)])


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 143}
# Each rank's vote; they are summed. SIGINT counts 1 and SIGTERM 2**20, so that fewer than 2**20 SIGINTs never look
# like a SIGTERM.
VOTES = {None: 0, 130: 1, 143: 1 << 20}
# Seconds. A signal to a whole job reaches torchrun and its ranks, and torchrun then forwards it to the ranks again.
ECHO = 2.0
LAUNCHED = "TORCHELASTIC_RUN_ID"


class StopRequest:
    """Remembers the first signal; the second ends the process at once, unless it is torchrun's echo of the first.

    Leaving the block restores the old handlers.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._first = (0, 0.0)
        self.agreed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            # Python allows signal handlers in the main thread only.
            return self
        for number in CODES:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                # `nohup` asks for a run that outlives its terminal.
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agree(self, votes: int) -> None:
        """Receive the sum of all votes, which is not zero."""
        if self.agreed is None:
            self.agreed = 143 if votes >= VOTES[143] else 130

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        code, now = CODES[signal.Signals(number)], time.monotonic()
        if self.code is None:
            self.code, self._first = code, (number, now)
            if os.environ.get("RANK", "0") == "0":
                # An update may take long; what prints progress may hold a lock here.
                with suppress(OSError):
                    os.write(
                        2, b"\na signal came: the run ends after this update; a second one ends it at once\n"
                    )
            return
        kind, began = self._first
        if LAUNCHED not in os.environ or number != kind or now - began > ECHO:
            os._exit(code)
