"""What a comparison is and takes, before it runs: its plan in words; time and disk from a pilot of a few updates."""

from __future__ import annotations

import heapq
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fathoms.comparing.before_runs import ASSUMED_ERROR
from fathoms.comparing.comparison import Comparison
from fathoms.comparing.folder import Cell, stale
from fathoms.comparing.hours import hours_lines
from fathoms.comparing.looks import smallest_shown
from fathoms.comparing.plan import pairs_of
from fathoms.comparing.progress import span
from fathoms.comparing.runner import Worker, task_of
from fathoms.comparing.statistics import MIN_SEEDS
from fathoms.comparing.tuning import FIRST_SEED
from fathoms.errors import ConfigError
from fathoms.text_table import plural
from fathoms.training.job import Job

LIMIT = 50.0
"""Seconds after which all pilots are ended, so that a dry run takes less than a minute on any machine."""

KEYS = ("start", "epoch", "bytes", "took")
Pilots = Mapping[str, Mapping[str, float]]
"""By architecture: seconds to start a run, of an epoch, of the pilot and to launch a worker; bytes of a checkpoint."""


def describe(comparison: Comparison, hours: bool = False) -> str:
    """A comparison's plan in words: arms, what differs, the noise floor, the smallest visible difference.

    Args:
        comparison: The plan.
        hours: Whether it says how long the runs would take on ImageNet.
    """
    names, seeds, settings = list(comparison.arms), comparison.seeds, comparison.settings
    pairs = len(pairs_of(comparison.settings_of_arms(), comparison.options.baseline))
    varied = list(dict.fromkeys(name for arm, _ in comparison.arms.values() for name in arm))
    rest = " and in nothing else" if varied else ""
    lines = [
        f"{plural(len(names), 'arm')} x {plural(seeds, 'seed')} = {plural(len(names) * seeds, 'run')}"
        f" in {comparison.folder.path}",
        *([f"arms differ in {', '.join(varied) or 'nothing'}{rest}:"] if pairs else []),
        *(f"  {name}" for name in names),
    ]
    lines.append(_runs(comparison))
    if hours:
        lines += hours_lines(((name, job) for name, (_, job) in comparison.arms.items()), seeds)
    if comparison.tuning is not None:
        choices, values = comparison.tuning.choices(), ", ".join(comparison.tuning.grid)
        tuning = comparison.tuning
        noise = f", noise of a trial at least {tuning.noise(100 * (1 - ASSUMED_ERROR)):.2f} points"
        lines.append(
            f"first {len(names)} x {len(choices)} trials of {values}, seed {FIRST_SEED},"
            f" measured on val ({tuning.images} images{noise if settings.metric == 'top1' else ''})"
        )
        if tuning.rate() is None:
            lines.append(
                "the best trial is chosen, which fakes differences: tune one option at three values or more"
            )
        else:
            lines.append(
                "the top of a parabola through the trials is chosen; values that diverge are left out"
            )
    if settings.looks:
        lines.append(f"looks at {', '.join(map(str, settings.looks))} seeds; pairs that are decided stop")
    if settings.keep_arms is not None:
        count, at = settings.keep_arms
        beside = "" if settings.baseline is None else ", and the baseline"
        lines.append(f"after {plural(at, 'seed')} the best {plural(count, 'arm')} go on{beside}")
    lines.append(f"held out: {settings.images} images of {settings.classes} classes")
    lines += [
        f"finished runs are then measured on {name} ({plural(len(source), 'image')}), which no verdict uses"
        for name, source in comparison.sets.items()
    ]
    lines += comparison.notes
    if not pairs:
        return "\n".join([*lines, "one arm: nothing is compared; add a value to --axis, or an --arm"])
    if seeds < MIN_SEEDS:
        return "\n".join([*lines, f"fewer than {MIN_SEEDS} seeds: there will be no verdict"])
    if not settings.floor:
        return "\n".join(lines)
    lines.append(f"noise floor {settings.floor:.2f} points (at {ASSUMED_ERROR:.0%} error)")
    # Seeds spread by once to twice the floor, in what was measured so far.
    shown = [
        smallest_shown(times * settings.floor, settings.looks or (seeds,), pairs, settings.paired)
        for times in (1, 1.5, 2)
    ]
    corrected = f"after correction for {plural(pairs, 'pair')}"
    lines.append(
        f"smallest difference these seeds show {corrected}: at least {shown[0]:.2f} points; "
        f"{shown[1]:.2f} or {shown[2]:.2f} where seeds spread by 1.5 or 2 floors, as they often do"
    )
    return "\n".join(lines)


def _runs(comparison: Comparison) -> str:
    """What the runs are: their models, epochs and learning rates."""
    jobs = [job for _, job in comparison.arms.values()]
    models = list(dict.fromkeys(job.model for job in jobs))
    named = models[0] if len(models) == 1 else f"{len(models)} models"
    epochs, rates = (
        " or ".join(map(str, dict.fromkeys(getattr(job.recipe, name) for job in jobs)))
        for name in ("epochs", "lr")
    )
    shapes = dict.fromkeys(
        f", {job.config.depth} blocks of {job.config.dim} channels, {job.config.image_size} pixels in patches of "
        f"{job.config.patch_size}"
        for job in jobs
        if job.config is not None
    )
    batch = jobs[0].recipe.batch_size * jobs[0].recipe.grad_accum_steps
    shape = next(iter(shapes)) if len(shapes) == 1 else ""
    return (
        f"each trains {named}{shape}, for {epochs} epochs in batches of {batch} at a learning rate of {rates}"
    )


def estimate(comparison: Comparison, say: Callable[[str], None], pilot: bool = True) -> str:
    """What is missing, and its expected time and disk from a pilot: a few timed updates of each architecture."""
    planned = [*(trial.cell for trial in comparison.trials()), *comparison.cells()]
    missing, slots = stale(planned, comparison.folder), comparison.slots()
    if not pilot:
        return f"{plural(len(missing), 'run')} missing"
    kinds = len({cell.architecture for cell in missing})
    say(f"timing a few updates of {plural(kinds, 'architecture')}; --no-pilot leaves this out")
    pilots = run_pilot(missing, slots)
    if pilots is None:
        return (
            f"{plural(len(missing), 'run')} missing: no time is known, since a few updates of each architecture take "
            f"longer than {LIMIT:.0f} s here; a smaller model, --image-size or --batch-size is quicker"
        )
    runs = [seconds_of(cell.job, pilots[cell.architecture]) for cell in missing]
    size = sum(pilots[cell.architecture]["bytes"] for cell in missing)
    kept = {"none": 0, "last": 1}.get(
        comparison.options.keep, 1 + next(iter(comparison.arms.values()))[1].run.checkpoint_hist
    )
    time = span(makespan(runs, len(slots)))
    return (
        f"{plural(len(missing), 'run')} missing: about {time} on {plural(len(slots), 'worker')},"
        f" {kept * size / 1e6:,.1f} MB of checkpoints kept"
    )


def run_pilot(
    cells: Iterable[Cell], slots: Sequence[dict[str, str]], limit: float | None = None
) -> dict[str, dict[str, float]] | None:
    """The pilot of each architecture on all workers at once, as runs will share the machine.

    None where they take longer than `limit` seconds, or `LIMIT`; one that cannot run is an error.
    """
    found: dict[str, dict[str, float]] = {}
    # A comparison that is only planned has no folder yet.
    with tempfile.TemporaryDirectory() as scratch:
        workers = [Worker(Path(scratch) / f"pilot-{place}.log", slot) for place, slot in enumerate(slots)]
        late = threading.Event()

        def end() -> None:
            late.set()
            for worker in workers:
                worker.process.kill()

        timer = threading.Timer(LIMIT if limit is None else limit, end)
        timer.start()
        pool = ThreadPoolExecutor(len(workers))
        try:
            for cell in cells:
                if cell.architecture in found:
                    continue
                task, began = {**task_of(cell), "pilot": True}, time.monotonic()
                results = list(pool.map(lambda worker, task=task: worker.ask(task), workers))
                if late.is_set():
                    return None
                for worker, result in zip(workers, results, strict=True):
                    why = worker.death() if result is None else result.get("reason")
                    if why:
                        raise ConfigError(
                            f"arm {cell.arm!r}: its pilot failed ({why}); fix it, or use --no-pilot"
                        )
                asked, known = time.monotonic() - began, list(filter(None, results))
                mean = {key: statistics.fmean(result[key] for result in known) for key in KEYS}
                found[cell.architecture] = {**mean, "launch": max(0.0, asked - mean["took"])}
        finally:
            timer.cancel()
            pool.shutdown()
            for worker in workers:
                worker.close()
    return found


def seconds_of(job: Job, pilot: Mapping[str, float]) -> float:
    """Seconds that a run takes."""
    return pilot["start"] + job.recipe.total_epochs * pilot["epoch"]


def makespan(seconds: Iterable[float], workers: int) -> float:
    """Seconds until all runs have ended, each begun in its order on the first worker that is free.

    >>> makespan([3.0, 2.0, 2.0], workers=2)
    4.0
    """
    free = [0.0] * workers
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)
