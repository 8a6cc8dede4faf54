"""Cells whose models are modules of Python code: no worker has them, so they are trained here, one after the other."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fathoms.comparing.folder import Cell
from fathoms.comparing.runner import Listener
from fathoms.comparing.worker import ResidentData, reason_of, train
from fathoms.data.readiness import median_side
from fathoms.data.sources.splits import open_roles
from fathoms.errors import ConfigError, FathomsError, flag_of
from fathoms.models.config import FIELDS
from fathoms.training.build import module_hash
from fathoms.training.job import GivenModule, Job

Make = Callable[[], nn.Module]
Jobs = dict[str, tuple[dict[str, str], Job]]


class Modules:
    """What makes the modules of arms, by the names of the arms."""

    def __init__(self, makers: Mapping[str, Make]) -> None:
        self.makers = makers

    def made(self, arm: str, seed: int) -> nn.Module | None:
        """The module of an arm, made after torch was seeded; None for an arm whose model has a name."""
        if arm not in self.makers:
            return None
        torch.manual_seed(seed)
        module = self.makers[arm]()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"arm {arm!r}: {type(module).__name__} is no torch.nn.Module; give what makes one"
            )
        return module

    def put_into(self, jobs: Jobs, switches: Mapping[str, Any]) -> Jobs:
        """The runs of all arms, those of modules with their class and a hash of what seed 0 makes of them."""
        size, found = switches.get("image_size"), dict(jobs)
        void = next((option for option in switches if option != "image_size"), None)
        if void is not None and jobs.keys() <= self.makers.keys():
            raise ConfigError(f"{flag_of(void)}: a module has no such switch; leave it out")
        for name in self.makers:
            if name not in jobs:
                raise ConfigError(
                    f"axes: arm {name!r} is a module, which goes with arms alone; leave them out"
                )
            settings, job = jobs[name]
            for option in settings:
                if option in FIELDS:
                    raise ConfigError(f"arm {name!r}: a module has no {option}; leave it out")
            size = size or median_side(open_roles(job.data, job.recipe.val_share).train)
            module = self.made(name, 0)
            assert module is not None
            if self.made(name, 0) is module:
                raise ConfigError(
                    f"arm {name!r}: its function gives one module again and again; give one that makes a new one"
                )
            given = GivenModule(size, module_hash(module))
            job = dataclasses.replace(job, model=type(module).__name__, config=None, module=given)
            found[name] = (settings, job)
        return found


class InProcess:
    """Runs cells in this process; a signal saves the one under way and ends.

    Args:
        modules: What makes the modules of arms.
        listener: Notified of every cell.
        seconds: Time after which no further cell starts; None without a limit.
    """

    def __init__(self, modules: Modules, listener: Listener, seconds: float | None = None) -> None:
        self.modules, self.listener = modules, listener
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.stopping = threading.Event()
        self._data = ResidentData()

    def run(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            if self.stopping.is_set() or (self.deadline is not None and time.monotonic() > self.deadline):
                return
            self.listener.began(cell)
            began = time.monotonic()
            result = self._train(cell)
            self.listener.ended(cell, {**result, "wall_seconds": time.monotonic() - began})
            if result["status"] == "interrupted":
                self.stop()

    def _train(self, cell: Cell) -> dict[str, Any]:
        try:
            roles = self._data.roles(cell.job, cell.fingerprint, cell.test)
            return train(cell.job, roles, self.modules.made(cell.arm, cell.seed))
        except FathomsError as error:
            return {"status": "failed", "reason": str(error)}
        except Exception as error:  # noqa: BLE001
            # A module of somebody's own may raise anything; the other arms go on.
            return {"status": "failed", "reason": reason_of(error)}

    def stop(self) -> None:
        self.stopping.set()

    kill = stop
