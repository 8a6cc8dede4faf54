"""An answer by a time that the user names: of the plans that fit, the one that shows the smallest difference.

1. All trials and three seeds of each arm come first. Where they do not fit, every second value of the grid is tried;
   then all runs are shortened, to a quarter of their epochs at least; else the time is refused.
2. The rest of the time goes to further seeds: of all arms if these show what matters where seeds spread by 1.5 noise
   floors, else of the best half after three seeds if that shows a smaller difference.
3. No more seeds are run than show what matters where seeds spread by two floors. From six seeds on, half of them are a
   look.

A tenth of the time is kept back. Once the trials have ended, step 2 is done again with the time that they took; after
the first score on the held-out images nothing changes.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fathoms.comparing.dry_run import LIMIT, Pilots, makespan, run_pilot
from fathoms.comparing.looks import seeds_for, smallest_shown
from fathoms.comparing.plan import counterparts, pairs_of
from fathoms.comparing.progress import span
from fathoms.comparing.statistics import ALPHA, MIN_SEEDS
from fathoms.errors import ConfigError
from fathoms.text_table import plural

if TYPE_CHECKING:
    from fathoms.comparing.comparison import Comparison

PILOT = 0.2
"""Share of the time after which a pilot is given up."""
KEPT_BACK = 0.1
"""Share of the time that is not planned with."""
SPREAD, WIDEST = 1.5, 2.0
"""Spread of seeds in noise floors that plans count with, and the widest that was measured."""
MOST = 100
"""Seeds of an arm."""
FEWEST_VALUES = 3
"""Values of a grid through which there is a parabola."""
SHORTEST = 0.25
"""Share of its epochs that a run is left."""


def until(clock: str, now: datetime.datetime) -> float | None:
    """Seconds until a time of day, tomorrow's if it has passed; None where it is not one.

    >>> until("17:30", datetime.datetime(2026, 1, 1, 17, 0))
    1800.0
    """
    if not (found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", clock.strip())):
        return None
    then = now.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    return (then - now).total_seconds() % 86400


@dataclass(frozen=True)
class Times:
    """What each run of an arm takes: seconds to start, of an epoch, and epochs of a run and of a trial."""

    start: float
    epoch: float
    epochs: float
    trial: float

    def run(self) -> float:
        """Seconds of a run."""
        return self.start + self.epochs * self.epoch

    def tried(self) -> float:
        """Seconds of a trial."""
        return self.start + self.trial * self.epoch


@dataclass(frozen=True)
class Task:
    """What is to be fitted into the time.

    Args:
        arms: Times of each arm.
        values: Values that are tried for each arm; 0 without tuning.
        workers: Runs at a time.
        launch: Seconds to launch the workers, before the trials and after each look.
        fixed: Arms of the baseline, which are never dropped.
        pairs: Pairs of the plan.
        margin: The smallest difference that matters, in noise floors.
        paired: Whether runs of a seed are paired.
    """

    arms: Sequence[Times]
    values: int
    workers: int
    launch: float
    fixed: int
    pairs: int
    margin: float
    paired: bool = False


@dataclass(frozen=True)
class Design:
    """Seeds of each arm, arms that go on after some of them, and the seconds that all runs take at most."""

    seeds: int
    keep: tuple[int, int] | None
    seconds: float

    @property
    def looks(self) -> tuple[int, ...]:
        """Half of the seeds and all of them, where half are enough for a verdict."""
        return (self.seeds // 2, self.seeds) if self.seeds // 2 >= MIN_SEEDS else ()

    def __str__(self) -> str:
        dropped = "" if self.keep is None else ", the best {} arms after {}".format(*self.keep)
        return f"{' and '.join(map(str, self.looks or (self.seeds,)))} seeds{dropped}"


def design_of(task: Task, seeds: int, keep: tuple[int, int] | None) -> Design:
    """A design with the time that it takes if no look decides anything."""
    design = Design(seeds, keep, 0.0)
    stops = sorted({*design.looks, seeds, *([keep[1]] if keep else [])})
    # One trial beyond the edge of the grid is counted for each arm.
    tried = [arm.tried() for arm in task.arms for _ in range(task.values + 1)] if task.values else []
    seconds = task.launch * bool(tried) + makespan(tried, task.workers)
    runs, before = sorted((arm.run() for arm in task.arms), reverse=True), 0
    for stop in stops:
        if keep is not None and before == keep[1]:
            # Which arms stay is not known: the slowest are counted.
            runs = runs[: keep[0] + task.fixed]
        seconds += task.launch + makespan(runs * (stop - before), task.workers)
        before = stop
    return replace(design, seconds=seconds)


def choose(task: Task, seconds: float) -> Design | None:
    """The design for these seconds, by the second and third step of the rule; None where three seeds do not fit."""
    level = ALPHA / max(1, task.pairs)
    enough = seeds_for(task.margin / WIDEST, math.sqrt(2) if task.paired else 1.0, level, pairs=task.paired)
    half = max(2, (len(task.arms) - task.fixed) // 2)
    found: list[Design] = []
    for keep in (None, (half, MIN_SEEDS)):
        if keep is not None and half >= len(task.arms) - task.fixed:
            continue
        fits = None
        for seeds in range(MIN_SEEDS + (keep is not None), min(enough or MOST, MOST) + 1):
            design = design_of(task, seeds, keep)
            if design.seconds > seconds:
                break
            fits = design
        if fits is not None:
            found.append(fits)
    if not found:
        return None
    shown = {
        design: smallest_shown(1.0, design.looks or (design.seeds,), task.pairs, task.paired)
        for design in found
    }
    if found[0].keep is None and shown[found[0]] <= task.margin / SPREAD:
        return found[0]
    return min(found, key=lambda design: shown[design])


def task_of(comparison: Comparison, pilots: Pilots, tuned: bool = False) -> Task:
    """What a comparison asks for; `tuned` once its trials have ended."""
    settings, arms = comparison.settings, comparison.settings_of_arms()
    tuning = None if tuned else comparison.tuning
    times = []
    for cell in comparison.cells(comparison.chosen):
        if cell.seed:
            continue
        pilot, epochs = pilots[cell.architecture], float(cell.job.recipe.total_epochs)
        trial = epochs if tuning is None or tuning.epochs is None else float(tuning.epochs)
        times.append(Times(pilot["start"], pilot["epoch"], epochs, trial))
    baseline = settings.baseline
    return Task(
        times,
        0 if tuning is None else len(tuning.choices()),
        len(comparison.slots()),
        max(pilot["launch"] for pilot in pilots.values()),
        0 if baseline is None else len(arms) - len(counterparts(arms, baseline)),
        len(pairs_of(arms, baseline)),
        settings.margin / settings.floor if settings.floor else WIDEST,
        settings.paired,
    )


def flags_for(comparison: Comparison, seconds: float, fixed_epochs: bool) -> dict[str, Any]:
    """What a pilot and the rule choose for these seconds, by the names of flags.

    Args:
        comparison: The comparison, with any number of seeds.
        seconds: Until the time that was named.
        fixed_epochs: Whether the epochs are not to be changed.
    """
    began = datetime.datetime.now()
    pilots = run_pilot(comparison.cells(), comparison.slots(), max(LIMIT, PILOT * seconds))
    if pilots is None:
        raise ConfigError("--by: a few updates of each architecture take too long here; name a later time")
    left = (seconds - (datetime.datetime.now() - began).total_seconds()) * (1 - KEPT_BACK)
    task, chosen = task_of(comparison, pilots), dict[str, Any]()
    rate = None if comparison.tuning is None else comparison.tuning.rate()
    long = design_of(task, MIN_SEEDS, None).seconds > left
    if long and rate is not None and len(thinned := rate[1][::2]) >= FEWEST_VALUES:
        task = replace(task, values=len(thinned))
        chosen["tune"] = f"{rate[0]}={','.join(f'{value:g}' for value in thinned)}"
    (whole, *others) = dict.fromkeys(job.recipe.epochs for _, job in comparison.arms.values())
    last = whole if fixed_epochs or others else math.ceil(whole * SHORTEST)
    for epochs in range(whole, last - 1, -1):
        shorter = _shortened(task, whole - epochs, comparison)
        least = design_of(shorter, MIN_SEEDS, None).seconds
        if least <= left:
            break
    chosen |= {"epochs": epochs} if epochs < whole else {}
    design = choose(shorter, left)
    if design is None:
        raise ConfigError(
            f"--by: {MIN_SEEDS} seeds of {plural(len(task.arms), 'arm')} take about {span(least / (1 - KEPT_BACK))} "
            "here; name a later time, or compare fewer arms"
        )
    keep = None if design.keep is None else "{}@{}".format(*design.keep)
    seeds = ",".join(map(str, design.looks or (design.seeds,)))
    times = {"seconds": seconds, "planned": round(design.seconds, 1), "launch": round(task.launch, 1)}
    return {"seeds": seeds, "keep_arms": keep, **chosen, **times}


def _shortened(task: Task, by: int, comparison: Comparison) -> Task:
    """The same with runs that are so many epochs shorter, and trials with them where they are whole runs."""
    whole = comparison.tuning is None or comparison.tuning.epochs is None
    arms = [replace(arm, epochs=arm.epochs - by, trial=arm.trial - by * whole) for arm in task.arms]
    return replace(task, arms=arms)


def refit(comparison: Comparison, rates: Mapping[str, Sequence[float]], seconds: float) -> Design | None:
    """The design by the time that trials took; None where nothing is to change.

    Args:
        comparison: The comparison, whose trials have ended.
        rates: By architecture, seconds of an epoch of each trial.
        seconds: That are left.
    """
    wanted = {cell.architecture for cell in comparison.cells(comparison.chosen)}
    known, tuned = comparison.folder.scores_known(), comparison.tuning is not None and comparison.ready
    if known or not tuned or not wanted <= rates.keys():
        return None
    launch = (comparison.options.by or {})["launch"]
    pilots = {name: {"start": 0.0, "epoch": fmean(each), "launch": launch} for name, each in rates.items()}
    task = task_of(comparison, pilots, tuned=True)
    return choose(task, seconds * (1 - KEPT_BACK)) or design_of(task, MIN_SEEDS, None)


def described(chosen: Mapping[str, Any]) -> str:
    """A line on what was chosen, in the flags that would ask for it."""
    names = [name for name in ("seeds", "keep_arms", "epochs", "tune") if chosen.get(name) is not None]
    words = " ".join(f"--{name.replace('_', '-')} {chosen[name]}" for name in names)
    return f"planned for {span(chosen['planned'])} of {span(chosen['seconds'])}, by a pilot: {words}"
