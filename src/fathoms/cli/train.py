"""Train a model. Run the same command again after a crash or a signal, and it resumes.

Without DATA it trains a deep, narrow ViT on scikit-learn's handwritten digits, in about a minute on a CPU. DATA is a
folder with train/ and val/ by class, an .npz, IDX or CIFAR binary files, tar shards, or a data set of the Hub. Under
torchrun the same command trains on all ranks. Flags override the recipe.
"""

from __future__ import annotations

import json as json_format
import os
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from fathoms.cli.flags.early_checks import check_run, path_or_digits
from fathoms.cli.flags.parse import Switches, given, optional
from fathoms.errors import printable
from fathoms.models.build_timm import TIMM
from fathoms.models.resolve import refuse_weights
from fathoms.text_table import plural
from fathoms.train.job import Job, RunOptions
from fathoms.train.quick_start import import_compiler_for, open_meanwhile, without_collection
from fathoms.train.recipe.recipe import Recipe
from fathoms.train.recipe.starting_point import starting_point

EXAMPLES = """
fathoms train
fathoms train photos/ --recipe cifar --model vit_small_patch16_224 --norm dyt --depth 24
fathoms train imagenet/ --recipe learnable_scaler_300 --workers 14
torchrun --nproc-per-node 8 -m fathoms train imagenet/ --recipe cait_400 --batch-size 128
"""

# Flags of timm and of its forks.
ALIASES = {
    "--warmup-epoch": "--warmup-epochs",
    "--img-size": "--image-size",
    "--in-chans": "--in-channels",
    "-b": "--batch-size",
    "-j": "--workers",
    # DATA has no flag.
    "--data-dir": "",
    "--data": "",
    "--grad-checkpoint": "--grad-checkpointing",
}

RecipeFlags: Any = optional(Recipe, "RecipeFlags", "Training options. Default: those of the recipe.")


@dataclass(frozen=True)
class Args:
    """Options of `fathoms train`."""

    data: tyro.conf.Positional[str | None] = None
    """Path of the data. Default: the built-in handwritten digits."""
    model: str | None = None
    """A name from `fathoms models`, or timm/NAME. Default: the recipe's model."""
    recipe: str | None = None
    """A name from `fathoms recipes`, or a TOML file. Default: `digits` without DATA, otherwise the defaults below."""
    json: bool = False
    """Print the summary as one JSON object on the last line."""
    run: RunOptions = field(default_factory=RunOptions)
    training: RecipeFlags = field(default_factory=RecipeFlags)
    switches: Switches = field(default_factory=Switches)


def make_job(args: Args) -> Job:
    """The job that the flags describe."""
    from fathoms.errors import ConfigError, flag_of
    from fathoms.models.zoo import model_config

    name = args.recipe or ("digits" if args.data is None else None)
    model, options, base = starting_point(name, args.model)
    recipe = Recipe.join(options, given(args.training))
    refuse_weights(model, "--model")
    switches = given(args.switches)
    if model.startswith(TIMM):
        if switches:
            first = flag_of(next(iter(switches)))
            raise ConfigError(f"{first}: timm models have no such switch; leave it out")
        return Job(args.data, model, None, recipe, args.run)
    return Job(args.data, model, model_config(model, **{**base, **switches}), recipe, args.run)


def run(args: Args) -> int:
    """Train, and print the result and its files."""
    from fathoms.train.record.start_profile import StartProfile

    start = StartProfile()
    args = replace(args, data=path_or_digits(args.data))
    # A rank that refuses before it has joined leaves the others waiting.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone:
        check_run(args.run, args.data, given(args.training).get("teacher"))
    job = make_job(args)
    with without_collection():
        from fathoms.train.distributed import gather_objects, join_world, leave_world, naming_lost_ranks
        from fathoms.train.trainer import Trainer

        roles = open_meanwhile(job)
        start.mark("imports")
    world = join_world(job.run.device)
    start.mark("device")
    if job.run.profile_start:
        start.wait_for(world.device)
    try:
        with naming_lost_ranks(world):
            if not alone:
                check_run(args.run, args.data, given(args.training).get("teacher"))
            with without_collection():
                import_compiler_for(job, world)
            start.mark("compiler")
            outcome = Trainer(job, world, roles=roles(), start=start).run()
            if world.is_main:
                from fathoms.report.page import write_report

                start.mark("training")
                write_report(job.folder)
                start.mark("report")
                # A run that was done already has made no update; its start.json stays.
                if job.run.profile_start and "first update" in start.rows:
                    start.write(job.folder)
                print_safely(json_format.dumps(outcome.summary) if args.json else closing(outcome.summary))
            # torchrun ends all ranks when one has left after a signal: none leaves while rank 0 still writes.
            gather_objects(world, None)
    finally:
        leave_world()
    return outcome.code


def print_safely(text: str) -> None:
    """Print, also into a closed pipe; the exit code must not depend on the reader."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


FILES = (
    "report.html",
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "checkpoints/last",
    "checkpoints/best",
)


def closing(summary: dict[str, Any]) -> str:
    """The last printed lines: status, accuracy, files and the next command."""
    done = plural(summary["epoch"], "epoch")
    lines = [f"{summary['status']} after {done}, {summary['seconds']:.0f} s of training"]
    last, best, test, folder = (summary[key] for key in ("last", "best", "test", "folder"))
    if last is not None:
        # If no evaluation was finite, there is no best one.
        at_best = "" if best is None else f" (best {best['top1']:.2f} % in epoch {best['epoch']})"
        lines.append(f"val accuracy {last['top1']:.2f} %{at_best}")
    if test is not None:
        lines.append(f"test accuracy {test['top1']:.2f} % of the last weights")
    if summary["reason"]:
        lines.append(summary["reason"])
    there = ", ".join(name for name in FILES if (Path(folder) / name).exists())
    lines.append(f"run folder {folder}: {there}")
    if summary["status"] == "done":
        of_best = ", of checkpoints/best" if (Path(folder) / "checkpoints" / "best").exists() else ""
        lines.append(f"next{of_best}: fathoms validate --checkpoint {shlex.quote(folder)}")
    elif summary["status"] == "interrupted":
        place = f"in epoch {summary['epoch'] + 1}, after update {summary['updates']}"
        lines.append(f"next: give the same command again; it resumes {place}")
    return "\n".join(map(printable, lines))
