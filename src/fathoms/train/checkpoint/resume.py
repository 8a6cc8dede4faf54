"""A run's counters out of a checkpoint and into one, and the checks before it goes on."""

from __future__ import annotations

from typing import Any

import torch

from fathoms.errors import ConfigError
from fathoms.models.config import ViTConfig
from fathoms.reading import read_json
from fathoms.registry import check_name
from fathoms.train.checkpoint import folder as checkpoints
from fathoms.train.checkpoint.folder import Checkpoint
from fathoms.train.checkpoint.state_dict import restore
from fathoms.train.context import Scene
from fathoms.train.distributed import gather_objects, sum_over_ranks
from fathoms.train.guard.policy import Guard
from fathoms.train.job import Job, differences
from fathoms.train.learner import Learner
from fathoms.train.recipe.recipe import Recipe
from fathoms.train.train_state import Course

LINES = ("metrics.jsonl", "probe.jsonl", "guard.jsonl")


def counters(scene: Scene, course: Course, guard: Guard) -> dict[str, Any]:
    """What state.json keeps besides the optimizer's part."""
    # One row of sums for each rank, on the device.
    rows = course.sums.new_zeros(scene.world.size, len(course.sums))
    rows[scene.world.rank] = course.sums
    return {
        **course.counts(),
        "sums": sum_over_ranks(scene.world, rows),
        "lines": {name: scene.folder.length(name) for name in LINES},
        "guard": guard.state(),
        "identity": scene.job.identity(),
        "data": scene.data.fingerprint,
        "world": scene.world.size,
        "steps": scene.data.train.batches,
        "classes": list(scene.data.classes),
    }


def go_on(scene: Scene, learner: Learner, course: Course, guard: Guard) -> list[str]:
    """Go on from the newest whole checkpoint, if there is one and the run is the same; what a user should know."""
    job, world, _, folder = scene
    check_allowed(job)
    if folder.writes:
        checkpoints.tidy(folder.checkpoints)
    gather_objects(world, None)
    newest = checkpoints.newest(folder.checkpoints)
    begun = newest is not None or any(folder.length(name) for name in LINES)
    if begun and job.run.resume == "never":
        raise ConfigError(f"{folder.path}: holds a run already; choose another --experiment or --resume auto")
    if newest is None:
        return begin_again(scene) if begun else []
    kept = checkpoints.read(newest)
    check_same_run(scene, kept)
    take_over(scene, learner, course, kept, str(newest))
    guard.load(kept.state["guard"])
    for name, length in kept.state["lines"].items():
        folder.cut(name, length)
    gather_objects(world, None)
    if folder.writes:
        checkpoints.drop_damaged(folder.checkpoints, newest)
    if kept.state["world"] in (None, world.size):
        return []
    return [
        f"goes on with {world.size} processes instead of {kept.state['world']}: "
        "the same pictures in every step, but sums in another order, so not bit for bit"
    ]


def begin_again(scene: Scene) -> list[str]:
    """Drop the rows of a run that was killed before its first checkpoint; those of one that ended are kept."""
    folder = scene.folder
    summary = folder.path / "summary.json"
    if summary.is_file() and read_json(summary, ConfigError).get("status") == "done":
        raise ConfigError(
            f"{folder.path}: holds a run that is done, without its checkpoints; choose another --experiment"
        )
    gather_objects(scene.world, None)
    for name in LINES:
        folder.cut(name, 0)
    return ["begins again: the run in this folder has left no checkpoint, and its rows are dropped"]


def check_same_run(scene: Scene, kept: Checkpoint) -> None:
    """Refuse a checkpoint of other settings or other data, with the difference, unless it is allowed by name."""
    where, allowed = scene.folder.path, scene.job.run.allow_change or ()
    changed = changes(kept.state, scene.job, scene.world.size)
    refused = [change for change in changed if not _is_allowed(change.partition(":")[0], allowed)]
    if refused:
        first = refused[0].partition(":")[0].rpartition(".")[2]
        raise ConfigError(
            f"{where}: holds a run with other settings ({'; '.join(refused)}); "
            f"choose another --experiment, or --allow-change {first}"
        )
    if kept.state["data"] != scene.data.fingerprint and "data" not in allowed:
        raise ConfigError(
            f"{where}: the data set has changed since this run began ({kept.state['data'][:12]} -> "
            f"{scene.data.fingerprint[:12]}); bring it back, choose another --experiment, or --allow-change data"
        )


def check_allowed(job: Job) -> None:
    """Refuse to allow a change of what does not exist."""
    full = _names(job.identity())
    known = [*full, *(name.rpartition(".")[2] for name in full)]
    for name in job.run.allow_change or ():
        check_name(name, known, "setting", "--allow-change")


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


def take_over(scene: Scene, learner: Learner, course: Course, kept: Checkpoint, where: str) -> None:
    """Weights, moments, averages and counters of a checkpoint."""
    restore(kept, learner, where)
    course.take(kept.state)
    sums = torch.tensor(kept.state["sums"], dtype=torch.float64)
    if len(sums) != scene.world.size:
        # Another number of processes: the first takes what all had.
        sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(scene.world.size - 1, 4)])
    course.sums.copy_(sums[scene.world.rank])
    if kept.state["steps"] not in (None, scene.data.train.batches):
        # Other data or another batch, by permission: the epoch under way has other steps, and begins anew.
        course.step, course.updates = 0, course.epoch * scene.updates_per_epoch
        course.sums.zero_()


def roll_back(scene: Scene, learner: Learner, course: Course, guard: Guard) -> None:
    """Put the last good checkpoint back in the middle of a run; the guard's own record goes on, and the time."""
    # Every rank reads what the first one has written.
    gather_objects(scene.world, None)
    newest = checkpoints.newest(scene.folder.checkpoints)
    if newest is None:
        raise ConfigError(f"{scene.folder.path}: no checkpoint to roll back to; it was removed")
    kept, spent = checkpoints.read(newest), course.seconds
    take_over(scene, learner, course, kept, str(newest))
    course.seconds = spent
    guard.roll_back(kept.state["guard"])
    for name, length in kept.state["lines"].items():
        if name != "guard.jsonl":
            scene.folder.cut(name, length)
