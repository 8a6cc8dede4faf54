"""The comparison folder: its plan, and the run folders of its cells, keyed by their settings and the data."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.comparing.plan import Plan, parse_seeds
from fathoms.errors import ConfigError, flag_of
from fathoms.files import open_own, refuse_links, write_atomic
from fathoms.models.config import ViTConfig
from fathoms.training.job import SPEED, Job, RunOptions, flat
from fathoms.training.recipe import Recipe
from fathoms.untrusted import read_json

ENDED = ("done", "diverged")
"""Statuses of runs that are never run again."""


@dataclass(frozen=True)
class Cell:
    """One run of one arm with one seed.

    Args:
        arm: The arm's name.
        settings: What makes the arm, by option.
        seed: Its seed.
        job: The run, whose folder lies in the comparison's.
        fingerprint: Of the data it is to be trained on.
        test: Whether the test set is evaluated at its end; a trial of tuning never touches it.
    """

    arm: str
    settings: Mapping[str, str]
    seed: int
    job: Job
    fingerprint: str
    test: bool = True

    @property
    def folder(self) -> Path:
        return self.job.folder

    @property
    def architecture(self) -> str:
        """Equal for cells whose compiled code is the same."""
        recipe = self.job.recipe
        speed = (*(getattr(recipe, name) for name in SPEED), recipe.batch_size)
        config = None if self.job.config is None else self.job.config.to_dict()
        other = (self.job.run.swap_norms, recipe.grad_checkpointing)
        return json.dumps([self.job.model, config, speed, other], sort_keys=True)


def make_cell(
    arm: str, settings: Mapping[str, str], seed: int, job: Job, fingerprint: str, root: Path
) -> Cell:
    """A cell in the folder `root`, named by its arm, seed and a digest of all that decides its result."""
    # A worker sees one GPU alone, whatever its number on this machine.
    device = job.run.device.partition(":")[0]
    run = dataclasses.replace(job.run, seed=seed, device=device, output=str(root), experiment=None)
    run = dataclasses.replace(run, allow_change=None)
    job = dataclasses.replace(job, run=run)
    # A name that begins with a dot is hidden.
    stem = re.sub(r"[^\w.=+-]+", "_", arm, flags=re.ASCII).strip("_").lstrip("._")[:80] or "arm"
    run = dataclasses.replace(run, experiment=f"{stem}-seed{seed}-{key_of(job, fingerprint)[:10]}")
    return Cell(arm, dict(settings), seed, dataclasses.replace(job, run=run), fingerprint)


def key_of(job: Job, fingerprint: str) -> str:
    """A digest of all that decides a run's result; the data count by their fingerprint, not their path."""
    identity = {**job.identity(), "data": fingerprint}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def job_to_json(job: Job) -> dict[str, Any]:
    """A job as plain data, for a worker process."""
    config = None if job.config is None else job.config.to_dict()
    return {
        "data": job.data,
        "model": job.model,
        "config": config,
        "recipe": job.recipe.to_dict(),
        "run": vars(job.run),
    }


def job_from_json(table: Mapping[str, Any]) -> Job:
    config = None if table["config"] is None else ViTConfig(**_tuples(table["config"]))
    recipe, run = Recipe(**_tuples(table["recipe"])), RunOptions(**_tuples(table["run"]))
    return Job(table["data"], table["model"], config, recipe, run)


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


VERSION = 1
_KINDS = {"base": dict, "keys": dict, "arms": dict, "tune": dict, "seeds": int, "keep": str}
MAX_FILE = 64 << 20
REMOVE = "remove the file, and the command of the comparison writes it again"
REMOVE_PLAN = "remove the file, and a command with all arms and seeds of the comparison writes it again"
NAMES = {"margin": "--smallest-difference"}
"""Settings of a plan that are not named as their flags are."""


@dataclass(frozen=True)
class Settings:
    """All of a comparison that is fixed before its first run.

    Args:
        command: The words after `fathoms`, as the user typed them; none where Python code plans it.
        base: Every setting that all arms share.
        data: Where the data was; its fingerprint decides.
        fingerprint: Of the data.
        images: Images that are held out.
        classes: Number of classes.
        largest_class: Share of the held-out images that are of the largest class.
        metric: top1 or loss.
        margin: The smallest difference that matters, in the metric's unit.
        floor: Deviation over seeds that the size of the held-out set lets expect, in the metric's unit.
        baseline: The arm that all others are compared with; None compares all pairs.
        paired: Whether runs of a seed start from the same weights.
        keep: Checkpoints of a finished run that stay: none, last or all.
        split: What scores are measured on: test, or val where the data has no test set.
        looks: Numbers of seeds at which the comparison is looked at; none without planned looks.
        keep_arms: Arms that go on, and after how many seeds.
    """

    command: tuple[str, ...]
    base: dict[str, Any]
    data: str
    fingerprint: str
    images: int
    classes: int
    largest_class: float
    metric: str
    margin: float
    floor: float
    baseline: str | None
    paired: bool
    keep: str
    split: str
    looks: tuple[int, ...] = ()
    keep_arms: tuple[int, int] | None = None


class ComparisonFolder:
    """`OUTPUT/NAME/` of a comparison; one process at a time writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def cells(self) -> Path:
        """Where the run folders are."""
        return self.path / "cells"

    @property
    def tuning(self) -> Path:
        """Where the run folders of tuning trials are."""
        return self.path / "tuning"

    def own(self, path: Path) -> Path:
        """A path in this folder that is about to be written or deleted; one behind a link is refused."""
        return refuse_links(self.path, path)

    def scores_known(self) -> bool:
        """Whether a run of the comparison has ended, so that what is planned from now on follows its score."""
        return any(self.cells.glob("*/summary.json"))

    @contextlib.contextmanager
    def locked(self, shard: tuple[int, int] = (1, 1)) -> Iterator[None]:
        """Hold the folder, or a shard of it; a second comparison in it is an error."""
        refuse_links(self.path.parent, self.path)
        self.own(self.cells).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            whole = shard == (1, 1)
            try:
                self._lock(held, ".lock", fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
                if not whole:
                    self._lock(held, f".lock-{shard[0]}-of-{shard[1]}", fcntl.LOCK_EX)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path}: another comparison holds this folder; choose another --experiment"
                ) from error
            yield

    def _lock(self, held: contextlib.ExitStack, name: str, kind: int, wait: bool = False) -> None:
        file = held.enter_context(open_own(self.path / name, "a"))
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the files that all shards write, the plan and the results; another shard waits for its turn."""
        with contextlib.ExitStack() as held:
            self._lock(held, ".lock-plan", fcntl.LOCK_EX, wait=True)
            yield

    def plan(self) -> dict[str, Any] | None:
        """The plan so far; None in a new folder."""
        path = self.path / "plan.json"
        if not path.is_file():
            if (self.path / "config.toml").is_file():
                raise ConfigError(f"{self.path}: holds a run, not a comparison; choose another --experiment")
            return None
        plan = read_json(path, ConfigError, MAX_FILE, REMOVE_PLAN)
        if plan.get("version") != VERSION:
            return plan
        for key, kind in _KINDS.items():
            if not isinstance(plan.get(key), kind):
                raise ConfigError(f"{path}: damaged ({key} is missing or wrong); choose another --experiment")
        # What a command may not ask for, a file may not either: names, values and the number of runs.
        Plan.from_dict({key: plan.get(key) for key in ("arms", "seeds", "tune")}, str(path))
        plan["looks"] = plan.get("looks") or []
        if plan["looks"]:
            parse_seeds(",".join(map(str, plan["looks"])), f"{path}: looks")
        return plan

    def begin(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Write the plan, joined with that of earlier commands; what is then planned.

        What the verdicts rest on (metric, margin, baseline) stays as it was before the first run.
        """
        with self.writing():
            before = self.plan()
            if before is not None:
                self.refuse_other(before, now)
            new = {**now, "grown": [], "exploratory": False}
            plan = new if before is None else _grown(before, now, self.scores_known())
            write_atomic(self.path / "plan.json", json.dumps(plan, indent=1).encode() + b"\n")
        return plan

    def refuse_other(self, before: Mapping[str, Any], now: Mapping[str, Any], changed_data: str = "") -> None:
        """Refuse a plan that does not continue the one that is there, by the first setting that differs.

        Args:
            before: The plan that is there.
            now: The one that is asked for.
            changed_data: The splits that differ, where the data do.
        """
        if before.get("version") != VERSION:
            raise ConfigError(f"{self.path}: its plan has version {before.get('version')!r}, not {VERSION}")
        what = _conflict(before["base"], now["base"])
        if what is None and before.get("fingerprint") != now["fingerprint"]:
            what = f"other data: {changed_data}" if changed_data else "other data"
        for key in ("metric", "margin", "baseline", "paired", "tune_epochs"):
            if what is None and before.get(key) != now[key]:
                old, new = (str(plan.get(key))[:16] for plan in (before, now))
                what = f"{NAMES.get(key, '--' + key.replace('_', '-'))} {old} -> {new}"
        changed = [name for name, key in before["keys"].items() if now["keys"].get(name, key) != key]
        for name, table in now["arms"].items():
            if before["arms"].get(name, table) != table:
                raise ConfigError(f"{self.path}: arm {name!r} has other settings there; use another name")
        if what is None and changed:
            what = f"arm {changed[0]!r} is another run there"
        if what is not None:
            raise ConfigError(f"{self.path}: holds another comparison ({what}); choose another --experiment")

    def status(self, cell: Cell) -> dict[str, Any]:
        """How far a cell is: its summary, or why it failed; {} if it was not begun or was cut."""
        path = cell.folder / "summary.json"
        summary = read_json(path, ConfigError, MAX_FILE, REMOVE) if path.is_file() else {}
        if summary.get("status") in ENDED:
            for split in ("test", "last"):
                check_measured(summary.get(split), f"{path}: {split}")
            return summary
        failed = cell.folder / "failed.json"
        return read_json(failed, ConfigError, MAX_FILE, REMOVE) if failed.is_file() else {}

    def timings(self) -> dict[str, Any]:
        """timings.json of earlier commands; a damaged one is written anew."""
        try:
            found = read_json(self.path / "timings.json", ConfigError, MAX_FILE)
        except ConfigError:
            return {}
        return {name: row for name, row in found.items() if isinstance(row, dict)}

    def note_failure(self, cell: Cell, reason: str) -> None:
        self.own(cell.folder).mkdir(parents=True, exist_ok=True)
        kept = json.dumps({"status": "failed", "reason": reason}).encode()
        write_atomic(cell.folder / "failed.json", kept + b"\n")

    def forget_failure(self, cell: Cell) -> None:
        (self.own(cell.folder) / "failed.json").unlink(missing_ok=True)

    def prune(self, cell: Cell, keep: str) -> None:
        """Delete the checkpoints of an ended cell that nobody asked to keep."""
        checkpoints = self.own(cell.folder / "checkpoints")
        if keep == "all" or not checkpoints.is_dir():
            return
        for checkpoint in checkpoints.iterdir():
            if keep == "none" or checkpoint.name != "last":
                if checkpoint.is_symlink() or checkpoint.is_file():
                    checkpoint.unlink()
                else:
                    shutil.rmtree(checkpoint)

    def write(self, name: str, text: str) -> None:
        """One file of results, whole or not at all."""
        write_atomic(self.path / name, text.encode())


def check_measured(measured: Any, where: str) -> None:
    """Refuse an evaluation in a summary whose accuracy or loss is no number that a run can have."""
    if measured is None:
        return
    for name, most in (("top1", 100.0), ("loss", math.inf)):
        value = measured.get(name, "missing") if isinstance(measured, dict) else "no table"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and abs(value) <= min(most, 1e300)):
            raise ConfigError(f"{where}: {name} is no score; {REMOVE}")


def _grown(before: Mapping[str, Any], now: Mapping[str, Any], known: bool) -> dict[str, Any]:
    """The earlier plan with the new command's arms, seeds and values to tune; `grown` has what was added.

    Seeds or looks that come once scores are `known` make the verdicts exploratory.
    """
    new = [name for name in now["arms"] if name not in before["arms"]]
    grown = list(before.get("grown", []))
    plan = {**before, **{key: now[key] for key in ("data", "base", "own", "split")}}
    plan["seeds"] = max(before["seeds"], now["seeds"])
    plan["keep_arms"] = now["keep_arms"] or before.get("keep_arms")
    if now["seeds"] >= before["seeds"]:
        plan["looks"] = now["looks"]
        other = plan["seeds"] > before["seeds"] or plan["looks"] != list(before.get("looks") or [])
        plan["exploratory"] = bool(before.get("exploratory")) or (known and other)
    if now["by"] is not None and not known:
        # Seeds that the time decides, which the trials told more of.
        plan |= {key: now[key] for key in ("seeds", "looks", "keep_arms")}
    for key in ("arms", "keys", "tune"):
        plan[key] = {**before[key], **now[key]}
    if new or plan["seeds"] > before["seeds"] or plan["tune"] != before["tune"]:
        added = {"command": now["command"], "arms": new, "seeds": plan["seeds"], "tune": plan["tune"]}
        grown.append(added)
    return {**plan, "grown": grown}


def _conflict(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first setting that both plans share among all their arms with different values, as "name old -> new"."""
    old, new = flat(before), flat(now)
    for key in sorted(old.keys() & new.keys()):
        if json.dumps(old[key]) != json.dumps(new[key]):
            return f"{flag_of(key.rpartition('.')[2])} {old[key]!r} -> {new[key]!r}"
    return None


def stale(cells: Sequence[Cell], folder: ComparisonFolder) -> list[Cell]:
    """The cells that are still to be run: not begun, cut, or failed."""
    return [cell for cell in cells if folder.status(cell).get("status") not in ENDED]


def shared_settings(jobs: Sequence[Job]) -> dict[str, Any]:
    """Settings that all arms share, by name, without data and seed."""
    shared = _common([job.identity() for job in jobs])
    return {key: value for key, value in shared.items() if key not in ("data", "seed")}


def own_settings(job: Job, base: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one arm that not all arms share."""
    return _rest({key: value for key, value in job.identity().items() if key not in ("data", "seed")}, base)


def _rest(whole: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for key, value in whole.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            rest[key] = _rest(value, base[key])
        elif key not in base:
            rest[key] = value
    return {key: value for key, value in rest.items() if value != {}}


def _common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *rest = tables
    common: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, Mapping) and all(isinstance(other[key], Mapping) for other in rest):
            common[key] = _common([table[key] for table in tables])
        elif all(other.get(key) == value for other in rest):
            common[key] = list(value) if isinstance(value, tuple) else value
    return common
