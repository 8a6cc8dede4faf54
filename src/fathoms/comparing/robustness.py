"""Finished runs on further image sets, such as ImageNet-V2: kept in each run's folder, shown, and never judged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.comparing.folder import MAX_FILE, REMOVE, Cell, check_measured
from fathoms.data.sources.splits import AnySource, open_held_out
from fathoms.errors import ConfigError
from fathoms.files import write_atomic
from fathoms.text_table import plural
from fathoms.untrusted import read_json

if TYPE_CHECKING:
    from fathoms.comparing.before_runs import Options

FILE = "robustness.json"
BATCH = 128


def open_sets(options: Options, classes: Sequence[str], modules: bool) -> dict[str, AnySource]:
    """The image sets by the last part of their path, each of classes that the runs are trained on."""
    from fathoms.evaluating.results import match_classes

    later = "once the runs are there, give the same command with --robustness and without it"
    barred = {
        "with --keep none, which deletes the weights; use --keep last": options.keep == "none",
        f"with --slurm; {later}": options.slurm is not None,
        f"with --shard; {later}": options.shard != (1, 1),
        "of modules of Python code, which no file names; leave it out": modules,
    }
    found: dict[str, AnySource] = {}
    for place in options.robustness:
        if why := next((why for why, holds in barred.items() if holds), None):
            raise ConfigError(f"--robustness {place}: cannot be had {why}")
        source, name = open_held_out(place), Path(place).name or place
        match_classes(source.classes, classes, place)
        if name in found:
            raise ConfigError(
                f"--robustness {place}: two sets are called {name!r}; rename one of the folders"
            )
        found[name] = source
    return found


def kept_scores(run: Path) -> dict[str, dict[str, Any]]:
    """What a run's folder keeps for each set: its fingerprint, its images, top-1 and loss."""
    path = run / FILE
    found = read_json(path, ConfigError, MAX_FILE, REMOVE) if path.is_file() else {}
    for name, measured in found.items():
        check_measured(measured, f"{path}: {name}")
    return found


def lacking(cells: Sequence[Cell], sets: Mapping[str, AnySource]) -> dict[Path, list[str]]:
    """The sets that each finished run has not been measured on; runs without weights are an error."""
    prints = {name: source.fingerprint() for name, source in sets.items()}
    found: dict[Path, list[str]] = {}
    for run in [cell.folder for cell in cells] if sets else []:
        summary = read_json(run / "summary.json", ConfigError) if (run / "summary.json").is_file() else {}
        kept = kept_scores(run)
        new = [name for name, print_ in prints.items() if kept.get(name, {}).get("fingerprint") != print_]
        if new and summary.get("status") == "done":
            found[run] = new
    if bare := [run for run in found if not (run / "checkpoints" / "last").is_dir()]:
        raise ConfigError(
            f"--robustness: {plural(len(bare), 'finished run')} kept no weights, such as {bare[0].name}; leave it out, "
            "or compare again with --keep last and another --experiment"
        )
    return found


def add_scores(
    cells: Sequence[Cell], sets: Mapping[str, AnySource], runner: Any, say: Callable[[str], None]
) -> None:
    """Measure the last weights of every finished run on the sets that it lacks, until the runner is to stop."""
    missing = lacking(cells, sets)
    if not missing:
        return
    from fathoms.evaluating.held_out import measure
    from fathoms.evaluating.load import load_run
    from fathoms.training.distributed import choose_device

    say(f"measuring {plural(len(missing), 'run')} on {', '.join(sets)}")
    device = choose_device(cells[0].job.run.device)
    for run, names in missing.items():
        if runner.stopping.is_set() or (runner.deadline is not None and time.monotonic() > runner.deadline):
            return
        loaded, kept = load_run(run / "checkpoints" / "last"), kept_scores(run)
        for name in names:
            found = measure(loaded, sets[name], BATCH, device)
            measured = {"top1": found.top1, "loss": found.loss, "images": found.images}
            kept[name] = {"fingerprint": sets[name].fingerprint(), **measured}
        write_atomic(run / FILE, json.dumps(kept, indent=1).encode() + b"\n")


def shown_scores(run: Path) -> dict[str, dict[str, float]]:
    """A run's part of its row: top-1 by set, where it was measured on any."""
    found = {name: measured["top1"] for name, measured in kept_scores(run).items()}
    return {"robustness": found} if found else {}


def mean_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """An arm's part of its summary: by set the mean over the runs that were measured on it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, top1 in row.get("robustness", {}).items():
            found.setdefault(name, []).append(top1)
    return {"robustness": {name: sum(each) / len(each) for name, each in found.items()}} if found else {}


def sets_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all sets that any row has a score on, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row.get("robustness", {})))
