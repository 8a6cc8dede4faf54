"""Experiment trackers: send the metrics to TensorBoard, W&B, MLflow or trackio.

`metrics.jsonl` stays the record. Trackers are fed by a background thread, and one that fails is dropped with a
warning: no tracker ever stops or slows a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fathoms.errors import ConfigError, reason
from fathoms.files import write_atomic
from fathoms.registry import Registry

PATIENCE = 30.0
"""Seconds that a run waits at its end for the trackers to write their last rows."""


@dataclass(frozen=True)
class RunInfo:
    """The run as trackers see it: its folder, its settings, and the updates already done."""

    folder: Path
    config: dict[str, Any]
    updates: int

    @property
    def key(self) -> str:
        """An id that stays the same when the run resumes."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]


@runtime_checkable
class Tracker(Protocol):
    """The interface of a tracker; an exception drops it."""

    def log(self, update: int, values: dict[str, float]) -> None:
        """Log numbers such as "val/top1" after update `update`."""

    def finish(self) -> None:
        """Write what is left, and close."""


# The metadata is the module that must be importable.
TRACKERS: Registry[Tracker, str] = Registry("tracker", default="")


@TRACKERS.add("tensorboard", "torch.utils.tensorboard")
class TensorBoard:
    """Event files in the run folder's `tensorboard/`."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rows after the last checkpoint of a killed run are written again.
        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.updates)

    def log(self, update: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, update)

    def finish(self) -> None:
        self.writer.close()


class _Init:
    """W&B, and trackio, which has the same interface."""

    module = "wandb"

    def __init__(self, run: RunInfo) -> None:
        self.tracker = importlib.import_module(self.module)
        self.tracker.init(**self.options(run))

    def options(self, run: RunInfo) -> dict[str, Any]:
        """Arguments of `init`; with the same id a resumed run stays one run."""
        folder = {"project": "fathoms", "name": run.folder.name, "config": run.config}
        return folder | {"id": run.key, "resume": "allow", "dir": str(run.folder)}

    def log(self, update: int, values: dict[str, float]) -> None:
        self.tracker.log(values, step=update)

    def finish(self) -> None:
        self.tracker.finish()


@TRACKERS.add("wandb", "wandb")
class WeightsAndBiases(_Init):
    """A run of project "fathoms" at W&B."""


@TRACKERS.add("trackio", "trackio")
class Trackio(_Init):
    """A run of project "fathoms" in trackio's local store."""

    module = "trackio"

    def options(self, run: RunInfo) -> dict[str, Any]:
        """Arguments of `init`; trackio finds a run by its name."""
        return {"project": "fathoms", "name": run.folder.name, "config": run.config, "resume": "allow"}


@TRACKERS.add("mlflow", "mlflow")
class MLflow:
    """A run of experiment "fathoms", wherever MLflow is set up to write."""

    def __init__(self, run: RunInfo) -> None:
        self.tracker = importlib.import_module("mlflow")
        self.tracker.set_experiment("fathoms")
        # MLflow chooses the id itself, so the run folder keeps it.
        kept = run.folder / "mlflow_run.txt"
        known = kept.read_text().strip() if kept.is_file() else None
        started = self.tracker.start_run(run_id=known, run_name=None if known else run.folder.name)
        if known is None:
            self.tracker.log_params({name: str(value)[:250] for name, value in run.config.items()})
            write_atomic(kept, f"{started.info.run_id}\n".encode())

    def log(self, update: int, values: dict[str, float]) -> None:
        self.tracker.log_metrics(values, step=update)

    def finish(self) -> None:
        self.tracker.end_run()


def parse_trackers(text: str | None) -> tuple[str, ...]:
    """The trackers of "tensorboard,wandb"; an unknown one, or one that is not installed, is refused."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        TRACKERS.check(name, "--log")
        try:
            importlib.import_module(TRACKERS.metadata(name))
        except ImportError as error:
            raise ConfigError(
                f"--log {name}: not installed; pip install 'fathoms[log]', or {name} alone"
            ) from error
    return names


class Trackers:
    """The trackers of a run, fed by one thread."""

    def __init__(self, names: Sequence[str], run: RunInfo, say: Callable[[str], None]) -> None:
        self._say = say
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(names, run), daemon=True)
        self._thread.start()

    def log(self, row: dict[str, Any]) -> None:
        """Queue a row of metrics.jsonl; returns at once."""
        about = ("epoch", "step", "split")
        numbers = {k: float(v) for k, v in row.items() if k not in about and isinstance(v, int | float)}
        self._rows.put((row["step"], {f"{row['split']}/{name}": v for name, v in numbers.items()}))

    def finish(self) -> None:
        """Let the trackers write what is left, for at most `PATIENCE` seconds."""
        self._rows.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._say(f"log: a tracker did not finish within {PATIENCE:.0f} s and is abandoned")

    def _write(self, names: Sequence[str], run: RunInfo) -> None:
        alive: dict[str, Tracker] = {}
        for name in names:
            with self._dropped_if_it_fails(alive, name):
                alive[name] = TRACKERS[name](run)
        while (row := self._rows.get()) is not None:
            for name in list(alive):
                with self._dropped_if_it_fails(alive, name):
                    alive[name].log(*row)
        for name in list(alive):
            with self._dropped_if_it_fails(alive, name):
                alive[name].finish()

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, alive: dict[str, Tracker], name: str) -> Iterator[None]:
        """Drop a tracker that raises; the run continues without it."""
        try:
            yield
        # A tracker is somebody else's code; none of its errors may end the run.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            alive.pop(name, None)
            self._say(f"log: {name} failed and is dropped ({reason(error)}); metrics.jsonl has everything")
