"""Save checkpoints: gather the state of a run, stage it in host memory, write it in the background.

Nothing is pickled: tensors go to safetensors files, everything else to state.json.
"""

from __future__ import annotations

import errno
import resource
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fathoms.training.checkpoint_files as checkpoints
from fathoms.errors import ConfigError, FathomsError, unforeseen
from fathoms.models.param_groups import state_bytes
from fathoms.models.weights import weights_of
from fathoms.optimizer_facts import OptimizerName
from fathoms.training.checkpoint_files import Checkpoint, Warn
from fathoms.training.distributed import sum_over_ranks, whole
from fathoms.training.guard import Guard
from fathoms.training.learner import Learner, RunContext, TrainState
from fathoms.training.optimizer_step import COUNTER
from fathoms.training.run_folder import RunFolder
from fathoms.training.speed import device_name

MARGIN = 1 << 20
"""Bytes for headers, state.json and metrics."""


def file_sizes(model: nn.Module, opt: OptimizerName, ema: bool) -> dict[str, int]:
    """Largest size in bytes of each file of a checkpoint."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in weights_of(model).values())
    return {"model": weights, "ema": weights if ema else 0, "optimizer": state_bytes(model, opt)}


def check_room(folder: Path, sizes: dict[str, int], keep: int) -> None:
    """Refuse a run whose checkpoints do not fit: those kept, the best, and the one being written."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(sizes.values())
    if limit != resource.RLIM_INFINITY and largest > limit:
        raise ConfigError(
            f"{folder}: a checkpoint has a file of {megabytes(largest)}, and the system allows "
            f"{megabytes(limit)}; raise `ulimit -f`"
        )
    needed = (keep + 2) * (sum(sizes.values()) + MARGIN)
    free = shutil.disk_usage(folder).free + _held(folder)
    if needed > free:
        raise ConfigError(
            f"{folder}: {keep + 2} checkpoints of {megabytes(sum(sizes.values()))} need {megabytes(needed)}, and "
            f"{megabytes(free)} are free; make room, choose another --output or a smaller --checkpoint-hist"
        )


def _held(folder: Path) -> int:
    """Bytes of the existing checkpoints, which new ones will replace; hard links count once."""
    stats = [path.lstat() for path in folder.rglob("*.safetensors")]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e10 else f"{size / 1e9:,.1f} GB"


LINES = ("metrics.jsonl", "probe.jsonl", "guard.jsonl", "updates.jsonl")
"""Files of the run folder that a checkpoint records the length of."""
Stage = Callable[[Tensor], Tensor]
"""Gets each tensor whole, one after the other, and returns the copy that the checkpoint keeps."""


def counters(context: RunContext, state: TrainState, guard: Guard) -> dict[str, Any]:
    """The values of state.json, except those of the optimizer and the loss scaler."""
    # One row of sums for each rank, on the device.
    state.note_memory(context.world.device)
    rows = state.sums.new_zeros(context.world.size, len(state.sums))
    rows[context.world.rank] = state.sums
    return {
        **vars(state),
        "sums": sum_over_ranks(context.world, rows),
        "bad_images": dict(context.data.train.stats.bad),
        "lines": {name: context.folder.length(name) for name in LINES},
        "guard": guard.state_dict(),
        "identity": context.job.identity(),
        "data": context.data.fingerprint,
        "world": context.world.size,
        "batches_per_epoch": context.batches_per_epoch,
        "classes": list(context.data.classes),
        "preprocessing": context.data.preprocessing.to_dict(),
        "device": device_name(context.world.device),
    }


def gather(learner: Learner, values: dict[str, Any], stage: Stage) -> Checkpoint:
    """Everything a run needs to resume; with sharded parameters every rank must call this."""
    moments, record = optimizer_state(learner.optimizer, stage)
    tensors = {"model": weights_of(learner.model)}
    if learner.ema is not None:
        tensors["ema"] = weights_of(learner.ema.module)
    full = {name: {key: stage(whole(value)) for key, value in part.items()} for name, part in tensors.items()}
    values = {key: stage(value) if isinstance(value, Tensor) else value for key, value in values.items()}
    values |= {"optimizer": record, "scaler": learner.scaler.state_dict(), "speed": vars(learner.speed)}
    return Checkpoint({**full, "optimizer": moments}, values)


def optimizer_state(
    optimizer: torch.optim.Optimizer, stage: Stage = lambda tensor: tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors as "exp_avg/blocks.0.attn.qkv.weight", and what JSON can hold: the optimizer, names, counters.

    Learning rates and other settings are left out: they follow from the recipe and the schedule. Sharded tensors
    (FSDP2) are gathered one by one, so every rank must call this.

    >>> groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "names": ["bias"]}]
    >>> tensors, record = optimizer_state(torch.optim.SGD(groups, lr=0.1))
    >>> tensors, record["parameters"]
    ({}, {'bias': []})
    """
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, list[str]] = {}
    numbers: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            parameters[name] = sorted(state)
            for kind, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{kind}/{name}"] = stage(whole(value).detach())
                else:
                    numbers[f"{kind}/{name}"] = value
            if COUNTER in group:
                numbers[f"{COUNTER}/{name}"] = group[COUNTER]
    record = {"optimizer": type(optimizer).__name__, "parameters": parameters, "numbers": numbers}
    return tensors, record


BLOCK = 64 << 20
ALIGN = 64
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StagingBuffers:
    """Page-locked host memory that every checkpoint reuses: `begin`, `stage` each tensor, `end`; then `wait`.

    Copies from a GPU are queued between the work that makes the tensors and the work that changes them, without a
    sync; the thread that reads them calls `wait` first. On a CPU they are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Tensor] = []
        self._block = self._used = 0
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def reserve(self, size: int) -> None:
        """Lock a number of bytes now; it takes a while, and is better done before training."""
        if self._event is not None and size > 0:
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def begin(self) -> None:
        """Start over; the previous copies are overwritten."""
        self._block = self._used = 0

    def stage(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete once `wait` returns."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone(memory_format=torch.contiguous_format)
        room = self._room(tensor.numel() * tensor.element_size())
        copy = room.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Mark the point at which all copies are made."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has made the copies."""
        if self._event is not None:
            self._event.synchronize()

    def _room(self, size: int) -> Tensor:
        padded = -(-size // ALIGN) * ALIGN
        while self._block < len(self._blocks) and self._used + padded > len(self._blocks[self._block]):
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self.reserve(max(padded, BLOCK))
        start, self._used = self._used, self._used + padded
        return self._blocks[self._block][start : start + size]


class SaveError(FathomsError):
    """A checkpoint could not be written; the previous one is still there."""


class AsyncSaver:
    """Saves checkpoints in a thread; an error is raised by the next `check` or `wait`."""

    def __init__(
        self, folder: RunFolder, keep: int, device: torch.device, warn: Warn = warnings.warn
    ) -> None:
        self.folder, self.keep, self.warn = folder, keep, warn
        self.staging = StagingBuffers(device)
        self._thread: threading.Thread | None = None
        self.news: list[str | SaveError] = []
        """What `check` passes on: warnings, and the error that ended a save."""

    def reserve(self, learner: Learner, opt: OptimizerName) -> None:
        """Refuse a run whose checkpoints do not fit on the disk, and lock the host memory to stage them."""
        sizes = file_sizes(learner.model, opt, learner.ema is not None)
        check_room(self.folder.checkpoints, sizes, self.keep)
        self.staging.reserve(sum(sizes.values()) + (1 << 22))

    def save(self, gather: Callable[[Stage], Checkpoint], best: bool = False) -> None:
        """Stage the tensors that `gather` asks for and start the thread. Every rank calls this; rank 0 writes."""
        if not self.folder.writes:
            gather(lambda tensor: tensor.new_empty(0, device="cpu"))
            return
        self.wait()
        self.staging.begin()
        checkpoint = gather(self.staging.stage)
        self.staging.end()
        self._thread = threading.Thread(target=self._work, args=(checkpoint, best), name="fathoms-save")
        self._thread.start()

    def check(self) -> None:
        """Pass on the thread's warnings, and raise its error."""
        while self.news:
            news = self.news.pop(0)
            if isinstance(news, SaveError):
                raise news
            self.warn(news)

    def wait(self) -> None:
        """Wait until nothing is being written, then `check`."""
        self.close()
        self.check()

    def close(self) -> None:
        """Wait until nothing is being written; an error stays for the next `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, checkpoint: Checkpoint, best: bool) -> None:
        try:
            self.staging.wait()
            self._write(checkpoint, best)
        except OSError as error:
            self.news.append(self._explain(error))
        # It would end with its thread; `check` raises it in the training loop.
        except Exception as error:  # noqa: BLE001
            failed = SaveError(
                f"{self.folder.checkpoints}: cannot save: {unforeseen(error)}; report it, and give the same command "
                "again to resume from the checkpoint before"
            )
            failed.__cause__ = error
            self.news.append(failed)

    def _write(self, checkpoint: Checkpoint, best: bool) -> None:
        place, warn = self.folder.checkpoints, self.news.append
        self.folder.sync()
        try:
            checkpoints.save(place, checkpoint, self.keep, warn, best)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            warn(f"{place}: {error.strerror}; removing older checkpoints and trying once more")
            checkpoints.make_room(place, warn)
            checkpoints.save(place, checkpoint, self.keep, warn, best)

    def _explain(self, error: OSError) -> SaveError:
        place = self.folder.checkpoints
        if error.errno in NO_ROOM:
            what = f"{error.strerror}; make room"
        elif not place.is_dir():
            what = "the folder is gone; restore it"
        else:
            what = f"{error.strerror or error}; fix it"
        last = place / "last"
        left = f"the checkpoint in {last} is whole" if last.is_dir() else "there is no checkpoint"
        return SaveError(f"{place}: cannot save: {what} and give the same command again; {left}")
