"""Save checkpoints in the background, one at a time.

Saving stages the tensors in page-locked host memory; a thread then hashes, writes, flushes and renames.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fathoms.errors import FathomsError, unforeseen
from fathoms.train.checkpoint import folder as checkpoints
from fathoms.train.checkpoint.folder import Checkpoint, Warn
from fathoms.train.checkpoint.state_dict import Stage
from fathoms.train.record.run_folder import RunFolder

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
    """Saves checkpoints in a thread; an error is raised by the next `check` or `wait`.

    Args:
        folder: The run's folder.
        keep: How many of the newest checkpoints to keep.
        device: Where the tensors are.
        warn: Called by the next `check` or `wait` with problems that are not fatal.
    """

    def __init__(
        self, folder: RunFolder, keep: int, device: torch.device, warn: Warn = warnings.warn
    ) -> None:
        self.folder, self.keep, self.warn = folder, keep, warn
        self.staging = StagingBuffers(device)
        self._thread: threading.Thread | None = None
        self._error: FathomsError | None = None
        self._warnings: list[str] = []

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
        while self._warnings:
            self.warn(self._warnings.pop(0))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

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
            self._error = self._explain(error)
        # It would end with its thread; `check` raises it in the training loop.
        except Exception as error:  # noqa: BLE001
            self._error = SaveError(
                f"{self.folder.checkpoints}: cannot save: {unforeseen(error)}; report it, and give the same command "
                "again to resume from the checkpoint before"
            )
            self._error.__cause__ = error

    def _write(self, checkpoint: Checkpoint, best: bool) -> None:
        place, warn = self.folder.checkpoints, self._warnings.append
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
