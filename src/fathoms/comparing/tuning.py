"""Tuning of each arm before its seeds: the same grid and the same trials for all, measured on val, never on test.

The best of a few single trials is partly luck, and luck in the rate is a true difference afterwards: equal arms tuned
so are called different in 10 to 28 % (`benchmarks/compare_statistics.py`), the more often the more seeds are run. A
parabola through all trials in the logarithm of the rate averages their noise; what is left of it widens the intervals.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fathoms.comparing.folder import MAX_FILE, REMOVE, VERSION, Cell, ComparisonFolder, make_cell
from fathoms.comparing.plan import JOINT
from fathoms.comparing.statistics import is_stalled, noise_floor
from fathoms.errors import ConfigError
from fathoms.training.job import Job
from fathoms.untrusted import epoch_of, read_json, read_lines

FIRST_SEED = 1000
"""Seed of the trials; apart from those of the final runs, which are counted from 0."""
STEPS = 2
"""Values that are tried beyond each edge of the grid, where the best one lies on it."""
WINDOW = 2.5
"""Steps of the grid on each side of the best trial that the parabola goes through; further off no curve is one."""
DRAWS = np.random.default_rng(0).normal(size=(64, 200))
LUCK = 1.75
"""Caution with the variance of what is lost: curves fall faster than their parabola on the side of high rates."""
SPREAD = 2.0
"""Noise of a trial, in floors of val: seeds spread by 0.9 to 2 of them in what was measured so far."""
LOWERED = 2
"""Times that a value is replaced by the next lower one, since a whole run diverged at it."""

Points = Mapping[float, float | None]
"""The score of each value that was tried, more is better; None where the trial diverged or learned nothing."""


@dataclass(frozen=True)
class Top:
    """The value that is chosen for an arm.

    Args:
        value: The value.
        rule: `parabola`, or `best` where no parabola has a top and the best trial is taken.
        octaves: Standard error of it, in factors of two; NaN where it is not known.
        lost: Score that an arm is expected to lose by that error.
        variance: Of that loss, which the test of a difference counts with.
        edge: Whether it is the least or the greatest value that was tried.
    """

    value: float
    rule: str
    octaves: float
    lost: float
    variance: float
    edge: bool


def next_value(points: Points, grid: Sequence[float]) -> float | None:
    """The value to try beyond an edge of the grid; None where the best is inside, or enough was tried.

    >>> next_value({1e-3: 50.0, 2e-3: 60.0, 4e-3: 70.0}, [1e-3, 2e-3, 4e-3])
    0.008
    """
    tried, trained = sorted(points), sorted(value for value, score in points.items() if score is not None)
    low, high = min(grid), max(grid)
    order = sorted(grid)
    below, above = sum(value < low for value in tried), sum(value > high for value in tried)
    best = max(trained, key=lambda value: points[value] or 0.0) if trained else None
    # A parabola through three trials has all of their noise; what diverges does so from above.
    few = len(trained) < 5 and any(points[value] is None for value in tried)
    if (best is None or best == tried[0] or few) and below < STEPS:
        return rounded(tried[0] * order[0] / order[1])
    if best is not None and best == tried[-1] and above < STEPS:
        return rounded(tried[-1] * order[-1] / order[-2])
    return None


def top_of(points: Points, noise: float) -> Top | None:
    """The top of a parabola through the trials around the best one; None where no trial trained.

    Args:
        points: Scores by value.
        noise: Least deviation of a trial's score.
    """
    trained = sorted(value for value, score in points.items() if score is not None)
    if not trained:
        return None
    scores = np.array([points[value] for value in trained], float)
    x, best = np.log2(trained), int(scores.argmax())
    step = statistics.median(np.diff(x).tolist()) if len(x) > 1 else 1.0
    near = np.abs(x - x[best]) <= WINDOW * step
    x, y = x[near], scores[near]
    tried = sorted(points)
    if len(x) >= 3:
        value, octaves, lost, variance = map(float, parabola_top(x, y, noise))
        value = rounded(value)
        return Top(value, "parabola", octaves, lost, variance, edge=not tried[0] < value < tried[-1])
    value = trained[best]
    return Top(value, "best", math.nan, noise, noise**2, value in (tried[0], tried[-1]))


def parabola_top(x: np.ndarray, y: np.ndarray, noise: Any) -> tuple[Any, ...]:
    """The top of a parabola, its error in octaves, what that is expected to lose, and the variance of the loss.

    Args:
        x: Logarithms of the values to the base of two.
        y: Their scores, and along further axes those of further arms.
        noise: Least deviation of a score.
    """
    middle, rest = float(x.mean()), len(x) - 3
    shape, solve, luck = _parabola(tuple(x - middle))
    fit = np.tensordot(solve, y, 1)
    spread = np.sqrt(((y - np.tensordot(shape, fit, 1)) ** 2).sum(0) / rest) if rest > 1 else 0.0
    # What would have been chosen by other draws of the trials' noise, and what that loses on this curve.
    drawn = np.asarray(np.maximum(noise, spread))[..., None] * luck.reshape(3, *[1] * (y.ndim - 1), -1)
    others = _highest(fit[..., None] + drawn, x[0] - middle, x[-1] - middle)
    at = _highest(fit, x[0] - middle, x[-1] - middle)
    a, b, _ = fit
    lost = (a * at**2 + b * at)[..., None] - (a[..., None] * others + b[..., None]) * others
    return 2 ** (middle + at), others.std(-1), lost.mean(-1), LUCK * lost.var(-1)


@functools.lru_cache(maxsize=1024)
def _parabola(x: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The powers of some places, what makes coefficients of the scores there, and those of drawn noise."""
    shape = np.vander(x, 3)
    solve = np.linalg.pinv(shape)
    return shape, solve, solve @ DRAWS[: len(x)]


def _highest(fits: np.ndarray, low: float, high: float) -> np.ndarray:
    """Where each parabola, a column of coefficients, is highest in a range."""
    a, b, _ = fits
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.clip(-b / (2 * a), low, high)
    side = np.where(a * high**2 + b * high > a * low**2 + b * low, high, low)
    return np.where(a < 0, inside, side)


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True)
class Trial:
    """One choice of values for one arm, and the run that tries it."""

    arm: str
    choice: Mapping[str, str]
    cell: Cell


@dataclass(frozen=True)
class Tuning:
    """A grid that is tried for every arm.

    Args:
        grid: Option names and the values to try.
        epochs: Epochs of a trial; None for those of a run.
        job: The run of an arm, or of a trial of it, by its name and its settings.
        metric: The score on val that decides.
        images: Images of val.
        largest: Share of them that are of the largest class.
    """

    grid: Mapping[str, Sequence[str]]
    epochs: int | None
    job: Callable[[str, Mapping[str, str]], Job]
    metric: str = "top1"
    images: int = 0
    largest: float = 0.0
    _made: dict[str, Job] = field(default_factory=dict, repr=False, compare=False)

    def made(self, name: str, settings: Mapping[str, str]) -> Job:
        """The run of an arm or a trial; parsed once, since each look asks for all of them again."""
        key = json.dumps([name, settings])
        if key not in self._made:
            self._made[key] = self.job(name, settings)
        return self._made[key]

    def rate(self) -> tuple[str, list[float]] | None:
        """The option that a parabola is laid through, and its values: the only one, of three values above zero."""
        (option, values), *others = self.grid.items()
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            return None
        return None if others or len(numbers) < 3 or min(numbers) <= 0 else (option, numbers)

    def choices(self) -> list[dict[str, str]]:
        names = list(self.grid)
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def trials(
        self, arms: Mapping[str, Mapping[str, str]], fingerprint: str, folder: ComparisonFolder
    ) -> list[Trial]:
        """The trials of all arms: the grid, and beyond its edges what the trials that have ended ask for."""
        made: list[Trial] = []
        for arm, settings in arms.items():
            own = [self.trial(arm, settings, choice, fingerprint, folder) for choice in self.choices()]
            while (further := self._further(own, folder)) is not None:
                own.append(self.trial(arm, settings, further, fingerprint, folder))
            made += own
        return made

    def trial(
        self,
        arm: str,
        settings: Mapping[str, str],
        choice: Mapping[str, str],
        fingerprint: str,
        folder: ComparisonFolder,
    ) -> Trial:
        shorter = {} if self.epochs is None else {"epochs": str(self.epochs)}
        tried = {**settings, **choice}
        name = JOINT.join([arm, *(f"{key}={value}" for key, value in choice.items())])
        job = self.made(name, {**tried, **shorter})
        cell = make_cell(name, tried, FIRST_SEED, job, fingerprint, folder.tuning)
        return Trial(arm, choice, dataclasses.replace(cell, test=False))

    def _further(self, own: Sequence[Trial], folder: ComparisonFolder) -> dict[str, str] | None:
        """The values of one more trial; None while some have not ended, and where the grid is wide enough."""
        if (rate := self.rate()) is None:
            return None
        rows = [_row(trial, folder) for trial in own]
        if any(row["status"] in ("pending", "failed") for row in rows):
            return None
        value = next_value(self._points(rows, rate[0]), rate[1])
        return None if value is None else {rate[0]: f"{value:g}"}

    def _points(self, rows: Sequence[Mapping[str, Any]], option: str) -> dict[float, float | None]:
        sign = 1 if self.metric == "top1" else -1
        return {
            float(row["choice"][option]): sign * row[self.metric] if self._trained(row) else None
            for row in rows
            if row["status"] != "failed"
        }

    def _trained(self, row: Mapping[str, Any]) -> bool:
        """Whether a trial ended with a score that is better than one answer for all images."""
        if row["status"] != "done" or row[self.metric] is None:
            return False
        return not (self.images and is_stalled(row["top1"] or 0.0, self.largest, self.images))

    def noise(self, score: float) -> float:
        """Deviation of a trial's accuracy that the size of val lets expect; that of a loss is not known."""
        if self.metric != "top1" or not self.images:
            return 0.0
        return SPREAD * 100 * noise_floor(1 - abs(score) / 100, self.images)

    def choose(self, trials: Sequence[Trial], folder: ComparisonFolder) -> list[dict[str, Any]]:
        """For each arm its trials and the choice on val; None where no trial has a score."""
        return [
            self._choose(arm, [_row(trial, folder) for trial in trials if trial.arm == arm])
            for arm in dict.fromkeys(trial.arm for trial in trials)
        ]

    def _choose(self, arm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        scored = [row for row in rows if self._trained(row)]
        # A trial that ended with an error tells nothing of its values, unlike one that diverged.
        failed = [row["choice"] for row in rows if row["status"] == "failed"]
        found: dict[str, Any] = {"name": arm, "best": None, "rule": "best", "luck": None, "edge": []}
        rest = {"replaced": [], "failed": failed, "trials": rows}
        if not scored:
            return {**found, **rest}
        if (rate := self.rate()) is not None:
            option, points = rate[0], self._points(rows, rate[0])
            reached = max(score for score in points.values() if score is not None)
            top = top_of(points, self.noise(reached))
            assert top is not None
            luck = {"octaves": None if math.isnan(top.octaves) else top.octaves}
            luck |= {"lost": top.lost, "variance": top.variance}
            found |= {"best": {option: f"{top.value:g}"}, "rule": top.rule, "luck": luck}
            return {**found, "edge": [option] if top.edge else [], **rest}
        sign = 1 if self.metric == "top1" else -1
        best = max(scored, key=lambda row: sign * row[self.metric])["choice"]
        return {**found, "best": best, "edge": _edges(best, [row["choice"] for row in rows]), **rest}

    def lowered(self, arm: Mapping[str, Any]) -> dict[str, str] | None:
        """The next lower value that trained on val; None where there is none, or it was lowered often enough."""
        if (rate := self.rate()) is None or arm["best"] is None or len(arm["replaced"]) >= LOWERED:
            return None
        points = self._points(arm["trials"], rate[0])
        now = float(arm["best"][rate[0]])
        lower = [value for value, score in points.items() if score is not None and value < now]
        return {rate[0]: f"{max(lower):g}"} if lower else None


def chosen_before(folder: ComparisonFolder) -> list[dict[str, Any]]:
    """The arms of tuning.json with what was chosen for them; none where it is not there."""
    path = folder.path / "tuning.json"
    arms = read_json(path, ConfigError, MAX_FILE, REMOVE).get("arms") if path.is_file() else []
    if not isinstance(arms, list) or not all(
        isinstance(arm, dict) and isinstance(arm.get("best", 0), dict | None) for arm in arms
    ):
        raise ConfigError(f"{path}: damaged (arms); {REMOVE}")
    empty = {"name": "", "rule": "best", "luck": None, "edge": [], "replaced": [], "failed": [], "trials": []}
    return [{**empty, **arm} for arm in arms]


def _row(trial: Trial, folder: ComparisonFolder) -> dict[str, Any]:
    """One trial: its last evaluation on val, and val by epoch."""
    status, cell = folder.status(trial.cell), trial.cell
    last = status.get("last") or {}
    return {
        "choice": dict(trial.choice),
        "seed": cell.seed,
        "status": status.get("status", "pending"),
        "reason": status.get("reason"),
        "top1": last.get("top1"),
        "loss": last.get("loss"),
        "curve": _curve(cell.folder),
        "run": str(cell.folder.relative_to(folder.path)),
    }


def _curve(run: Path) -> list[dict[str, Any]]:
    return [
        {"epoch": int(epoch_of(row)), "top1": row.get("top1"), "loss": row.get("loss")}
        for row in read_lines(run / "metrics.jsonl")
        if row.get("split") == "val"
    ]


def _edges(best: Mapping[str, str], choices: Sequence[Mapping[str, str]]) -> list[str]:
    """Options whose best value is the least or the greatest of the grid, where values are numbers."""
    edges: list[str] = []
    for name, value in best.items():
        try:
            numbers = [float(choice[name]) for choice in choices]
        except ValueError:
            continue
        if float(value) in (min(numbers), max(numbers)):
            edges.append(name)
    return edges


def tuning_file(found: Sequence[Mapping[str, Any]], tuning: Tuning) -> str:
    """tuning.json: the grid, and each arm's trials with their curves."""
    table = {
        "version": VERSION,
        "metric": tuning.metric,
        "split": "val",
        "grid": {name: list(values) for name, values in tuning.grid.items()},
        "epochs": tuning.epochs,
        "arms": list(found),
    }
    return json.dumps(table, indent=1) + "\n"


def tuning_lines(found: Sequence[Mapping[str, Any]], unit: str = "points") -> list[str]:
    """What was chosen from what and how surely, a line an arm; edges, replaced values and failed trials are named."""
    lines: list[str] = []
    for arm in found:
        said = "no trial has a score; it keeps the settings of all arms"
        if arm["best"] is not None:
            said = _written(arm["best"])
            luck, trained = arm["luck"], sum(row["status"] == "done" for row in arm["trials"])
            if arm["rule"] == "parabola" and luck:
                said += f", the top of a parabola through {trained} trials"
                said += f", known to a factor of {2 ** luck['octaves']:.2g}, which costs {luck['lost']:.2g} {unit}"
            elif trained:
                said += f", the best of {trained} trials"
        if arm["replaced"]:
            tried = " and ".join(map(_written, arm["replaced"]))
            said += f"; whole runs diverged at {tried}, so all its seeds have the next lower value"
        if arm["edge"]:
            said += f"; {', '.join(arm['edge'])} is at the edge of what was tried; a wider grid may do better"
        if arm["failed"]:
            said += f"; tried in vain, since the run failed: {' and '.join(map(_written, arm['failed']))}"
        lines.append(f"tuning {arm['name']}: {said}")
    return lines


def _written(choice: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in choice.items())
