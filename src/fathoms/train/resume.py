"""A run's counters out of a checkpoint and into one, and the checks before it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fathoms.errors import ConfigError
from fathoms.models.config import ViTConfig
from fathoms.registry import check_name
from fathoms.train import checkpoint as checkpoints
from fathoms.train.checkpoint import Checkpoint
from fathoms.train.distributed import gather_objects, sum_over_ranks
from fathoms.train.job import Job, differences
from fathoms.train.recipe import Recipe
from fathoms.train.state import restore

if TYPE_CHECKING:
    from fathoms.train.loop import Trainer

COUNTERS = ("epoch", "step", "updates", "best", "last", "seconds")
LINES = ("metrics.jsonl", "probe.jsonl", "guard.jsonl")


def counters(trainer: Trainer) -> dict[str, Any]:
    """What state.json keeps besides the optimizer's part."""
    return {
        **{name: getattr(trainer, name) for name in COUNTERS},
        "sums": _sums_of_all(trainer),
        "lines": {name: trainer.folder.length(name) for name in LINES},
        "guard": trainer.guard.state(),
        "identity": trainer.job.identity(),
        "data": trainer.data.fingerprint,
        "world": trainer.world.size,
        "steps": trainer.data.train.steps,
        "classes": list(trainer.data.classes),
    }


def _sums_of_all(trainer: Trainer) -> torch.Tensor:
    """One row of sums for each rank, on the device."""
    rows = trainer.sums.new_zeros(trainer.world.size, len(trainer.sums))
    rows[trainer.world.rank] = trainer.sums
    return sum_over_ranks(trainer.world, rows)


def go_on(trainer: Trainer) -> None:
    """Go on from the newest whole checkpoint, if there is one and the run is the same."""
    check_allowed(trainer.job)
    if trainer.folder.writes:
        checkpoints.tidy(trainer.folder.checkpoints)
    gather_objects(trainer.world, None)
    folder = checkpoints.newest(trainer.folder.checkpoints)
    if folder is None:
        return
    if trainer.job.run.resume == "never":
        raise ConfigError(
            f"{trainer.folder.path}: holds a run already; choose another --experiment or --resume auto"
        )
    kept = checkpoints.read(folder)
    check_same_run(trainer, kept)
    take_over(trainer, kept, str(folder))
    trainer.guard.load(kept.state["guard"])
    if kept.state["world"] not in (None, trainer.world.size):
        trainer.notices.append(
            f"goes on with {trainer.world.size} processes instead of {kept.state['world']}: "
            "the same pictures in every step, but sums in another order, so not bit for bit"
        )
    for name, length in kept.state["lines"].items():
        trainer.folder.cut(name, length)


def check_same_run(trainer: Trainer, kept: Checkpoint) -> None:
    """Refuse a checkpoint of other settings or other data, with the difference, unless it is allowed by name."""
    where, allowed = trainer.folder.path, trainer.job.run.allow_change or ()
    changed = changes(kept.state, trainer.job, trainer.world.size)
    refused = [change for change in changed if not _is_allowed(change.partition(":")[0], allowed)]
    if refused:
        first = refused[0].partition(":")[0].rpartition(".")[2]
        raise ConfigError(
            f"{where}: holds a run with other settings ({'; '.join(refused)}); "
            f"choose another --experiment, or --allow-change {first}"
        )
    if kept.state["data"] != trainer.data.fingerprint and "data" not in allowed:
        raise ConfigError(
            f"{where}: the data set has changed since this run began ({kept.state['data'][:12]} -> "
            f"{trainer.data.fingerprint[:12]}); bring it back, choose another --experiment, or --allow-change data"
        )


def check_allowed(job: Job) -> None:
    """Refuse to allow a change of what does not exist."""
    for name in job.run.allow_change or ():
        known = _names(job.identity())
        check_name(
            name, [*known, *(other.rpartition(".")[2] for other in known)], "setting", "--allow-change"
        )


def changes(state: dict[str, Any], job: Job, world: int) -> list[str]:
    """What differs between the run in a checkpoint and a job, one "name: old -> new" each.

    A setting that did not exist then had today's default. Another number of processes may share the same batch.
    """
    before, now = dict(state["identity"]), job.identity()
    before["recipe"] = {**Recipe().to_dict(), **before["recipe"]}
    if before["config"] is not None:
        before["config"] = {**ViTConfig().to_dict(), **before["config"]}
    then, batch = before["recipe"]["batch_size"], now["recipe"]["batch_size"]
    shared = state["world"] is not None and then * state["world"] == batch * world
    if shared:
        before["recipe"]["batch_size"] = batch
    elif state["world"] not in (None, world) and then == batch:
        processes = f"batch_size: {then} x {state['world']} processes -> {batch} x {world}"
        return [processes, *differences(before, now)]
    return differences(before, now)


def _is_allowed(name: str, allowed: tuple[str, ...]) -> bool:
    return name in allowed or name.rpartition(".")[2] in allowed


def _names(table: dict[str, Any], path: str = "") -> list[str]:
    found: list[str] = []
    for key, value in table.items():
        found += _names(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]
    return found


def take_over(trainer: Trainer, kept: Checkpoint, where: str) -> None:
    """Weights, moments, averages and counters of a checkpoint."""
    restore(kept, trainer.model, trainer.optimizer, trainer.ema, trainer.scaler, where)
    if trainer.copies is not None:
        trainer.copies.push_weights()
    for name in COUNTERS:
        setattr(trainer, name, kept.state[name])
    sums = torch.tensor(kept.state["sums"], dtype=torch.float64)
    if len(sums) != trainer.world.size:
        # Another number of processes: the first takes what all had.
        sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(trainer.world.size - 1, 4)])
    trainer.sums.copy_(sums[trainer.world.rank])
    trainer.fresh.zero_()
    if kept.state["steps"] not in (None, trainer.data.train.steps):
        # Other data or another batch, by permission: the epoch under way has other steps, and begins anew.
        trainer.step, trainer.updates = 0, trainer.epoch * trainer.updates_per_epoch
        trainer.sums.zero_()


def roll_back(trainer: Trainer) -> str:
    """Put the last good checkpoint back in the middle of a run; the guard's own record goes on."""
    trainer.saver.wait()
    # Every rank reads what the first one has written.
    gather_objects(trainer.world, None)
    folder = checkpoints.newest(trainer.folder.checkpoints)
    if folder is None:
        raise ConfigError(f"{trainer.folder.path}: no checkpoint to roll back to; it was removed")
    kept = checkpoints.read(folder)
    spent = trainer.seconds
    take_over(trainer, kept, str(folder))
    trainer.seconds = spent
    trainer.guard.roll_back(kept.state["guard"])
    trainer.optimizer.zero_grad(set_to_none=True)
    for name, length in kept.state["lines"].items():
        if name != "guard.jsonl":
            trainer.folder.cut(name, length)
    return f"back at epoch {trainer.epoch}, update {trainer.updates}"
