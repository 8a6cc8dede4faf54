"""Resume a run from its newest checkpoint, or roll it back to it, after checking that it is the same run."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

import fathoms.training.checkpoint_files as checkpoints
from fathoms.errors import ConfigError, FathomsError, WeightsError, reason
from fathoms.models.weights import put_weights
from fathoms.registry import check_name, nearest
from fathoms.training.checkpoint_files import VERSION, Checkpoint, why_unusable
from fathoms.training.checkpoint_save import LINES
from fathoms.training.distributed import gather_objects, spread_like
from fathoms.training.guard import GUARD_COUNTS, Guard
from fathoms.training.job import Job, differences, flat
from fathoms.training.learner import Learner, RunContext, TrainState
from fathoms.training.optimizer_step import COUNTER
from fathoms.training.speed import LAUNCHES, PRECISIONS, SCOPES, Speed
from fathoms.untrusted import read_json

# Above any count of a run, below what would overflow a tensor's index.
_MOST = 10**15


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_evaluation(value: Any) -> bool:
    return isinstance(value, dict) and _is_number(value.get("top1")) and _is_count(value.get("epoch"))


def _are_sums(value: Any) -> bool:
    return (
        isinstance(value, list) and all(_are_numbers(row) and len(row) == 4 for row in value) and bool(value)
    )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("epoch", "batch", "updates", "batches_per_epoch", "world"), _is_count),
    "seconds": lambda value: _is_number(value) and 0 <= value < _MOST,
    "sums": _are_sums,
    "best": lambda value: value is None or (_is_evaluation(value) and _is_number(value.get("highest"))),
    "last": lambda value: value is None or _is_evaluation(value),
    **dict.fromkeys(("identity", "identity.recipe", "optimizer", "lines"), _is_dict),
    **dict.fromkeys(("optimizer.parameters", "optimizer.numbers", "guard", "speed"), _is_dict),
    "identity.config": lambda value: isinstance(value, dict | None),
    "optimizer.optimizer": lambda value: isinstance(value, str),
    "scaler": lambda value: _is_dict(value) and (not value or all(_is_number(value.get(k)) for k in _SCALER)),
    "data": lambda value: isinstance(value, str),
    "speed.precision": lambda value: value in PRECISIONS,
    "speed.compile_scope": lambda value: value in SCOPES,
    "speed.launch": lambda value: value in LAUNCHES,
    "speed.torchcompile": lambda value: (
        isinstance(value, str) and bool(re.fullmatch(r"[\w.-]{1,100}", value))
    ),
    "device": lambda value: isinstance(value, str | None) and len(value or "") <= 200,
    "bad_images": lambda value: _is_dict(value) and all(isinstance(reason, str) for reason in value.values()),
    "peak_memory": lambda value: value is None or _is_count(value),
    **{f"guard.{name}": _is_count for name in GUARD_COUNTS},
    **dict.fromkeys(("guard.passed_over", "guard.losses"), _are_numbers),
}
"""Types and ranges of state.json, which whoever edits a file can also give a hash."""


def check_state(state: dict[str, Any], where: str) -> None:
    """Check the types and ranges of state.json, and that its names stay inside the run folder."""
    if state.get("version") != VERSION:
        raise WeightsError(
            f"{where}: checkpoint version {state.get('version')!r}, this fathoms reads {VERSION} only; install the one "
            "that wrote it, or start a new run with another --experiment"
        )
    wrong = [path for path, fits in FITS.items() if not fits(_at(state, path))]
    # The files are cut to these lengths: a name with a path in it would cut somebody else's file.
    wrong += [
        f"lines.{name}"
        for name, length in (state["lines"] if not wrong else {}).items()
        if not (re.fullmatch(r"[a-z]+\.jsonl", name) and _is_count(length))
    ]
    if not wrong and state["world"] != len(state["sums"]):
        wrong = ["world"]
    if wrong:
        raise WeightsError(f"{where}/state.json: invalid value of {wrong[0][:80]}; the checkpoint is corrupt")


def _at(state: Any, path: str) -> Any:
    """The value at a path such as "guard.losses"; None if it is missing."""
    for key in path.split("."):
        state = state.get(key) if isinstance(state, dict) else None
    return state


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint whose hashes and state are valid; anything else is an error."""
    why = why_unusable(folder)
    if why:
        raise WeightsError(f"{folder}: not a whole checkpoint: {why}")
    state = read_json(folder / "state.json", WeightsError)
    check_state(state, str(folder))
    try:
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{folder}: {reason(error)}") from error
    return Checkpoint(tensors, state)


def restore(checkpoint: Checkpoint, learner: Learner, where: str) -> None:
    """Put the tensors of a checkpoint back into the model, its EMA, the optimizer and the loss scaler."""
    put_weights(learner.model, checkpoint.tensors["model"], f"{where}/model", spread_like)
    if learner.compute_copy is not None:
        learner.compute_copy.push_weights()
    moments = checkpoint.tensors.get("optimizer", {})
    load_optimizer_state(learner.optimizer, moments, checkpoint.state["optimizer"])
    if learner.ema is not None:
        if "ema" not in checkpoint.tensors:
            raise WeightsError(f"{where}: has no EMA; leave --model-ema out, as this run began")
        put_weights(learner.ema.module, checkpoint.tensors["ema"], f"{where}/ema", spread_like)
    if checkpoint.state["scaler"]:
        learner.scaler.load_state_dict(checkpoint.state["scaler"])


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], record: dict[str, Any]
) -> None:
    """Put back the result of `optimizer_state`; a missing or extra name or tensor is an error.

    Tensors get the devices and dtypes that torch's own `load_state_dict` gives them, and are sharded again where
    the parameter is, over any number of ranks.
    """
    ours = type(optimizer).__name__
    if record["optimizer"] != ours:
        raise WeightsError(
            f"optimizer state: saved by {record['optimizer']}, but the run uses {ours}; use the same optimizer"
        )
    kinds: dict[str, list[str]] = record["parameters"]
    names = [name for group in optimizer.param_groups for name in group["names"]]
    _check_same("parameter", set(kinds), set(names))
    numbers = record["numbers"]
    expected = {f"{kind}/{name}" for name in names for kind in kinds[name]}
    _check_same("tensor", set(tensors), expected - set(numbers))

    current = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, current["param_groups"], strict=True):
        rows = zip(group["names"], group["params"], saved["params"], strict=True)
        for name, parameter, index in rows:
            entries = {kind: tensors.get(key := f"{kind}/{name}", numbers.get(key)) for kind in kinds[name]}
            _check_shapes(name, parameter, entries)
            if entries:
                state[index] = {
                    # Only what has the parameter's shape is sharded; a counter kept as a tensor stays whole.
                    kind: spread_like(value, parameter) if isinstance(value, Tensor) else value
                    for kind, value in entries.items()
                }
        if COUNTER in group:
            saved[COUNTER] = _common_count(group["names"], numbers)
    optimizer.load_state_dict({**current, "state": state})


def _check_same(what: str, saved: set[str], expected: set[str]) -> None:
    """Refuse a state with other names than the optimizer's."""
    if missing := sorted(expected - saved):
        near = nearest(missing[0], sorted(saved))
        hint = f" (it has {near!r})" if near else ""
        raise WeightsError(
            f"optimizer state: {len(missing)} {what}s are missing, the first {missing[0]!r}{hint}; "
            "it belongs to another model"
        )
    if extra := sorted(saved - expected):
        raise WeightsError(
            f"optimizer state: {len(extra)} {what}s are not in this run, the first {extra[0]!r}; "
            "it belongs to another model"
        )


def _check_shapes(name: str, parameter: Tensor, entries: dict[str, Any]) -> None:
    for kind, value in entries.items():
        # A counter kept as a tensor has no dimensions, whatever the parameter has.
        if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise WeightsError(
                f"optimizer state: {kind}/{name} is {tuple(value.shape)}, the parameter "
                f"{tuple(parameter.shape)}; it belongs to another model"
            )


def _common_count(names: list[str], numbers: dict[str, Any]) -> int:
    """The one counter of a group, which all its parameters must have been saved with."""
    counts = {numbers.get(f"{COUNTER}/{name}") for name in names}
    count = counts.pop()
    if counts or not isinstance(count, int):
        raise WeightsError(
            f"optimizer state: the parameters around {names[0]!r} were in other groups; "
            "use the same --weight-decay and --layer-decay"
        )
    return count


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
    checkpoint = read(newest)
    check_same_run(context, checkpoint, learner)
    load_checkpoint(context, learner, state, checkpoint, str(newest))
    guard.load_state_dict(checkpoint.state["guard"])
    cut_rows(context, checkpoint)
    gather_objects(world, None)
    if folder.writes:
        checkpoints.drop_damaged(folder.checkpoints, newest)
    if checkpoint.state["world"] == world.size:
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
    if "data" not in allowed and context.data.fingerprint != saved["data"]:
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
    full = list(flat(job.identity()))
    known = [*full, *(name.rpartition(".")[2] for name in full)]
    for name in job.run.allow_change or ():
        check_name(name, known, "setting", "--allow-change")


def changes(saved: dict[str, Any], job: Job, world: int) -> list[str]:
    """The differences between the run in a checkpoint and a job, one "name: old -> new" each.

    Another number of ranks may share the same global batch.
    """
    before, now = copy.deepcopy(saved["identity"]), job.identity()
    then, batch = before["recipe"]["batch_size"], now["recipe"]["batch_size"]
    if then * saved["world"] == batch * world:
        before["recipe"]["batch_size"] = batch
    elif saved["world"] != world and then == batch:
        ranks = f"batch_size: {then} x {saved['world']} ranks -> {batch} x {world}"
        return [ranks, *differences(before, now)]
    return differences(before, now)


def speed_changes(saved: dict[str, str], speed: Speed) -> list[str]:
    """The differences between the recorded speed and the one asked for that change the result."""
    # A graph replays the numbers of the kernels that it has captured, and the recipe decides what is compiled.
    now, names = vars(speed), ("precision", "torchcompile")
    return [f"recipe.{name}: {saved[name]} -> {now[name]}" for name in names if saved[name] != now[name]]


def _with_flag(change: str) -> str:
    """A change by the name of its flag, as in "--lr: 0.1 -> 0.2"; the data are an argument without one."""
    name, _, values = change.partition(":")
    flag = name.rpartition(".")[2].replace("_", "-")
    return f"{flag if flag == 'data' else f'--{flag}'}:{values}"


def _is_allowed(name: str, allowed: tuple[str, ...]) -> bool:
    return name in allowed or name.rpartition(".")[2] in allowed


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
    if saved["batches_per_epoch"] != context.batches_per_epoch:
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
    checkpoint, seconds = read(newest), state.seconds
    load_checkpoint(context, learner, state, checkpoint, str(newest))
    state.seconds = seconds
    guard.roll_back(checkpoint.state["guard"])
    cut_rows(context, checkpoint, but="guard.jsonl")


def cut_rows(context: RunContext, checkpoint: Checkpoint, but: str = "") -> None:
    """Drop the rows that were written after a checkpoint."""
    for name, length in checkpoint.state["lines"].items():
        if name != but:
            context.folder.cut(name, length)
