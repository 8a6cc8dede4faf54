"""What a comparison is and takes, before it runs: its plan in words, and time and disk from a pilot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fathoms.comparing.before_runs import ASSUMED_ERROR
from fathoms.comparing.comparison import Comparison
from fathoms.comparing.folder import stale
from fathoms.comparing.hours import hours_lines
from fathoms.comparing.looks import smallest_shown
from fathoms.comparing.pilot import LIMIT, makespan, run_pilot, seconds_of
from fathoms.comparing.plan import pairs_of
from fathoms.comparing.progress import span
from fathoms.comparing.tuning import FIRST_SEED
from fathoms.text_table import plural


def describe(comparison: Comparison, hours: bool = False) -> str:
    """A comparison's plan in words: arms, what differs, the noise floor, the smallest visible difference.

    Args:
        comparison: The plan.
        hours: Whether it says how long the runs would take on ImageNet.
    """
    from fathoms.comparing.statistics import MIN_SEEDS

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
    if comparison.options.per_gpu > 1 and not mps_runs():
        lines.append(
            f"--per-gpu {comparison.options.per_gpu}: NVIDIA's MPS does not run, so the runs of a GPU take turns;"
            " start it with nvidia-cuda-mps-control -d"
        )
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


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs: kernels of several processes then share a GPU at the same time."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
