"""Saving beside the training: one thread hashes, writes, flushes and renames, at most one checkpoint at a time."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fathoms.errors import FathomsError
from fathoms.train.checkpoint import folder as checkpoints
from fathoms.train.checkpoint.folder import Checkpoint, Tell
from fathoms.train.checkpoint.staging import HostCopies
from fathoms.train.record.run_folder import RunFolder

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Take = Callable[[Tensor], Tensor]


class SaveError(FathomsError):
    """A checkpoint could not be written; the one before it is still there."""


class Saver:
    """Saves what a `gather` function takes; its errors come up at the next `check`, and at `wait`.

    Args:
        folder: The run's folder.
        keep: Newest checkpoints that stay.
        device: Where the tensors are.
        tell: Told, at the next `check` or `wait`, about what went wrong and was not fatal.
    """

    def __init__(
        self, folder: RunFolder, keep: int, device: torch.device, tell: Tell = warnings.warn
    ) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell
        self.copies = HostCopies(device)
        self._thread: threading.Thread | None = None
        self._error: FathomsError | None = None
        self._told: list[str] = []

    def save(self, gather: Callable[[Take], Checkpoint], best: bool = False) -> None:
        """Copy everything to the host and hand it to the thread; every rank calls this, the first one writes."""
        if not self.folder.writes:
            gather(lambda tensor: tensor.new_empty(0, device="cpu"))
            return
        self.wait()
        self.copies.begin()
        kept = gather(self.copies.take)
        self.copies.end()
        self._thread = threading.Thread(target=self._work, args=(kept, best), name="fathoms-save")
        self._thread.start()

    def check(self) -> None:
        """Say what the thread had to say, and raise what it failed with."""
        while self._told:
            self.tell(self._told.pop(0))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until nothing is being written any more."""
        self.close()
        self.check()

    def close(self) -> None:
        """Wait as well, and keep an error for later."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, kept: Checkpoint, best: bool) -> None:
        try:
            self.copies.ready()
            self._write(kept, best)
        except OSError as error:
            self._error = self._explain(error)
        except Exception as error:
            self._error = SaveError(
                f"{self.folder.checkpoints}: cannot save ({type(error).__name__}: {error})"
            )

    def _write(self, kept: Checkpoint, best: bool) -> None:
        place, tell = self.folder.checkpoints, self._told.append
        self.folder.sync()
        try:
            checkpoints.save(place, kept, self.keep, tell, best)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            tell(f"{place}: {error.strerror}; removing older checkpoints and trying once more")
            checkpoints.make_room(place, tell)
            checkpoints.save(place, kept, self.keep, tell, best)

    def _explain(self, error: OSError) -> SaveError:
        place = self.folder.checkpoints
        if error.errno in NO_ROOM:
            what = f"{error.strerror}; make room"
        elif not place.is_dir():
            what = "the folder is gone; bring it back"
        else:
            what = f"{error.strerror or error}; mend it"
        whole = place / "last"
        kept = f"the checkpoint in {whole} is whole" if whole.is_dir() else "there is no checkpoint"
        return SaveError(f"{place}: cannot save: {what} and give the same command again; {kept}")
