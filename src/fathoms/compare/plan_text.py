"""The plan of a comparison in words, before it runs: arms, noise floor, expected time and disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fathoms.compare.comparison import ASSUMED_ERROR, Comparison
from fathoms.compare.folder import stale
from fathoms.compare.pairs import pairs_of
from fathoms.compare.progress import span
from fathoms.compare.tuning import FIRST_SEED
from fathoms.text_table import plural


def describe(comparison: Comparison) -> str:
    """A comparison's plan in words: arms, what differs, the noise floor, the smallest visible difference."""
    from fathoms.compare.statistics import ALPHA, MIN_SEEDS, detectable

    names, seeds, settings = list(comparison.arms), comparison.seeds, comparison.settings
    pairs = len(pairs_of(comparison.settings_of_arms(), comparison.options.baseline))
    varied = list(dict.fromkeys(name for arm, _ in comparison.arms.values() for name in arm))
    rest = " and in nothing else" if varied else ""
    unit = "points" if settings.metric == "top1" else "of loss"
    lines = [
        f"{plural(len(names), 'arm')} x {plural(seeds, 'seed')} = {plural(len(names) * seeds, 'run')}"
        f" in {comparison.folder.path}",
        *([f"arms differ in {', '.join(varied) or 'nothing'}{rest}:"] if pairs else []),
        *(f"  {name}" for name in names),
    ]
    if comparison.tuning is not None:
        choices, values = comparison.tuning.choices(), ", ".join(comparison.tuning.grid)
        lines.append(
            f"first {len(names)} x {len(choices)} trials of {values}, measured on val, seed {FIRST_SEED}"
        )
    lines.append(f"held out: {settings.images} images of {settings.classes} classes")
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
    lines.append(f"noise floor {settings.floor:.2f} {unit} (at {ASSUMED_ERROR:.0%} error)")
    least = detectable(settings.floor, seeds, ALPHA / pairs)
    corrected = f"after correction for {plural(pairs, 'pair')}"
    lines.append(f"smallest difference these seeds show {corrected}: {least:.2f} {unit}")
    return "\n".join(lines)


def estimate(comparison: Comparison, say: Callable[[str], None]) -> str:
    """Expected time and disk of what is missing, from a pilot: a few timed updates of each architecture."""
    from fathoms.compare.workers.pilot import expected, run_pilot

    slots = comparison.slots()
    missing = stale([*(trial.cell for trial in comparison.trials()), *comparison.cells()], comparison.folder)
    kinds = len({cell.architecture for cell in missing})
    say(f"timing a few updates of {plural(kinds, 'architecture')}; --no-pilot leaves this out")
    seconds, size = expected(missing, run_pilot(missing, slots[0]), len(slots))
    kept = {"none": 0, "last": 1}.get(
        comparison.options.keep, 1 + next(iter(comparison.arms.values()))[1].run.checkpoint_hist
    )
    return (
        f"{plural(len(missing), 'run')} missing: about {span(seconds)} on {plural(len(slots), 'worker')},"
        f" {kept * size / 1e6:,.1f} MB of checkpoints kept"
    )


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs: kernels of several processes then share a GPU at the same time."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
