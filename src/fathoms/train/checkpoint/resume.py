"""Resume a run from its newest checkpoint, or roll it back to it, after checking that it is the same run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from fathoms.errors import ConfigError, FathomsError
from fathoms.files.untrusted import read_json
from fathoms.names.registry import check_name
from fathoms.train.checkpoint import folder as checkpoints
from fathoms.train.checkpoint.folder import Checkpoint
from fathoms.train.checkpoint.migrate import migrate
from fathoms.train.checkpoint.state_dict import LINES, restore
from fathoms.train.checkpoint.validate import check_state
from fathoms.train.context import RunContext, TrainState
from fathoms.train.distributed import gather_objects
from fathoms.train.guard.policy import Guard
from fathoms.train.identity import completed, differences
from fathoms.train.job import Job
from fathoms.train.learner import Learner
from fathoms.train.precision.speed import Speed


def resume(context: RunContext, learner: Learner, state: TrainState, guard: Guard) -> list[str]:
    """Resume from the newest whole checkpoint, if there is one and the run is the same; lines for the user."""
    job, world, _, folder = context
    check_allowed(job)
    if folder.writes:
        checkpoints.clean_up(folder.checkpoints)
    gather_objects(world, None)
    newest = checkpoints.newest(folder.checkpoints)
    begun = newest is not None or any(folder.length(name) for name in LINES)
    if begun and job.run.resume == "never":
        raise ConfigError(f"{folder.path}: holds a run already; choose another --experiment or --resume auto")
    if newest is None:
        return start_over(context) if begun else []
    checkpoint = checkpoints.read(newest)
    check_same_run(context, checkpoint, learner)
    load_checkpoint(context, learner, state, checkpoint, str(newest))
    guard.load_state_dict(checkpoint.state["guard"])
    cut_rows(context, checkpoint)
    gather_objects(world, None)
    if folder.writes:
        checkpoints.drop_damaged(folder.checkpoints, newest)
    if checkpoint.state["world"] in (None, world.size):
        return []
    return [
        f"resumes with {world.size} ranks instead of {checkpoint.state['world']}: "
        "the same images in every update, but sums in another order, so not bit for bit"
    ]


def start_over(context: RunContext) -> list[str]:
    """Drop the rows of a run that was killed before its first checkpoint; those of a finished run are kept."""
    folder = context.folder
    summary = folder.path / "summary.json"
    if summary.is_file() and read_json(summary, ConfigError).get("status") == "done":
        raise ConfigError(
            f"{folder.path}: holds a run that is done, without its checkpoints; choose another --experiment"
        )
    gather_objects(context.world, None)
    for name in LINES:
        folder.cut(name, 0)
    return ["starts over: the run in this folder has left no checkpoint, and its rows are dropped"]


def recorded_speed(checkpoints_folder: Path) -> dict[str, Any] | None:
    """The speed of the run in a folder, and its device; None if it has no checkpoint to resume from."""
    for folder in checkpoints.candidates(checkpoints_folder):
        with contextlib.suppress(FathomsError):
            state = read_json(folder / "state.json", ConfigError)
            check_state(state, str(folder))
            state = migrate(state, str(folder))
            return {**state["speed"], "device": state["device"]}
    return None


def check_same_run(context: RunContext, checkpoint: Checkpoint, learner: Learner) -> None:
    """Refuse a checkpoint of other settings or other data, naming the difference, unless --allow-change names it."""
    where, allowed, saved = context.folder.path, context.job.run.allow_change or (), checkpoint.state
    changed = [
        *changes(saved, context.job, context.world.size),
        *speed_changes(saved["speed"], learner.speed),
    ]
    refused = [change for change in changed if not _is_allowed(change.partition(":")[0], allowed)]
    if refused:
        names = [change.partition(":")[0].rpartition(".")[2] for change in refused]
        raise ConfigError(
            f"{where}: holds a run with other settings ({'; '.join(map(_with_flag, refused))}); "
            f"choose another --experiment{_or_allow(context, checkpoint, learner, names)}"
        )
    if "data" not in allowed and not context.data.roles.has_fingerprint(saved["data"]):
        raise ConfigError(
            f"{where}: the data set has changed since this run began "
            f"({context.data.roles.changes(saved['data'])}); restore it, or choose another --experiment"
            f"{_or_allow(context, checkpoint, learner, ['data'])}"
        )


def _or_allow(context: RunContext, checkpoint: Checkpoint, learner: Learner, names: list[str]) -> str:
    """The flag that allows the changes, if the checkpoint fits this run; without --experiment it needs that too."""
    try:
        # This run is refused, so the weights may stay in it.
        restore(checkpoint, learner, str(context.folder.path))
    except FathomsError:
        return ""
    run = context.job.run
    allowed = " ".join([*(run.allow_change or ()), *names])
    experiment = "" if run.experiment is not None else f"--experiment {context.folder.path.name} "
    return f", or {experiment}--allow-change {allowed}"


def check_allowed(job: Job) -> None:
    """Refuse an --allow-change of a setting that does not exist."""
    full = [*_names(completed(job.identity())), *(f"recipe.{name}" for name in NUMERIC)]
    known = [*full, *(name.rpartition(".")[2] for name in full)]
    for name in job.run.allow_change or ():
        check_name(name, known, "setting", "--allow-change")


def changes(saved: dict[str, Any], job: Job, world: int) -> list[str]:
    """The differences between the run in a checkpoint and a job, one "name: old -> new" each.

    A setting that is newer than the checkpoint had today's default. Another number of ranks may share the same
    global batch.
    """
    before, now = completed(saved["identity"]), completed(job.identity())
    then, batch = before["recipe"]["batch_size"], now["recipe"]["batch_size"]
    shared = saved["world"] is not None and then * saved["world"] == batch * world
    if shared:
        before["recipe"]["batch_size"] = batch
    elif saved["world"] not in (None, world) and then == batch:
        ranks = f"batch_size: {then} x {saved['world']} ranks -> {batch} x {world}"
        return [ranks, *differences(before, now)]
    return differences(before, now)


NUMERIC = ("precision", "torchcompile", "compile_scope")
"""Parts of a speed that move the numbers; a graph replays the numbers of the kernels it has captured."""


def speed_changes(saved: dict[str, str], speed: Speed) -> list[str]:
    """The differences between the recorded speed and the one asked for that change the result."""
    now = vars(speed)
    names = NUMERIC if speed.compiles else NUMERIC[:2]
    return [f"recipe.{name}: {saved[name]} -> {now[name]}" for name in names if saved[name] != now[name]]


def _with_flag(change: str) -> str:
    """A change by the name of its flag, as in "--lr: 0.1 -> 0.2"; the data are an argument without one."""
    name, _, values = change.partition(":")
    flag = name.rpartition(".")[2].replace("_", "-")
    return f"{flag if flag == 'data' else f'--{flag}'}:{values}"


def _is_allowed(name: str, allowed: tuple[str, ...]) -> bool:
    return name in allowed or name.rpartition(".")[2] in allowed


def _names(table: dict[str, Any], path: str = "") -> list[str]:
    found: list[str] = []
    for key, value in table.items():
        found += _names(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]
    return found


def load_checkpoint(
    context: RunContext, learner: Learner, state: TrainState, checkpoint: Checkpoint, where: str
) -> None:
    """Restore the weights, moments, EMA and counters of a checkpoint."""
    restore(checkpoint, learner, where)
    saved = checkpoint.state
    state.load(saved)
    # They count towards --max-bad, whichever process met them.
    context.data.train.stats.bad.update(saved["bad_images"])
    sums = torch.tensor(saved["sums"], dtype=torch.float64)
    if len(sums) != context.world.size:
        # Another number of ranks: rank 0 takes the sums of all.
        sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(context.world.size - 1, 4)])
    state.sums.copy_(sums[context.world.rank])
    if saved["batches_per_epoch"] not in (None, context.batches_per_epoch):
        # Other data or another batch size, allowed by name: the current epoch has other batches and starts over.
        state.batch, state.updates = 0, state.epoch * context.updates_per_epoch
        state.sums.zero_()


def roll_back(context: RunContext, learner: Learner, state: TrainState, guard: Guard) -> None:
    """Return to the last good checkpoint in the middle of a run; the guard's counters and the time stay."""
    # Every rank reads what rank 0 has written.
    gather_objects(context.world, None)
    newest = checkpoints.newest(context.folder.checkpoints)
    if newest is None:
        raise ConfigError(f"{context.folder.path}: no checkpoint to roll back to; it was removed")
    checkpoint, seconds = checkpoints.read(newest), state.seconds
    load_checkpoint(context, learner, state, checkpoint, str(newest))
    state.seconds = seconds
    guard.roll_back(checkpoint.state["guard"])
    cut_rows(context, checkpoint, but="guard.jsonl")


def cut_rows(context: RunContext, checkpoint: Checkpoint, but: str = "") -> None:
    """Drop the rows that were written after a checkpoint; files that it does not know of begin with it."""
    lengths = {"updates.jsonl": 0, **checkpoint.state["lines"]}
    for name, length in lengths.items():
        if name != but:
            context.folder.cut(name, length)
