"""Train a model. Run the same command again after a crash or a signal, and it resumes.

Without DATA it trains a deep, narrow ViT on scikit-learn's handwritten digits, in about a minute on a CPU. DATA is a
folder with train/ and val/ by class, an .npz, IDX or CIFAR binary files, tar shards, or a data set of the Hub. Under
torchrun the same command trains on all ranks. Flags override the recipe.
"""

from __future__ import annotations

import json as json_format
import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from fathoms.cli.flags.early_checks import check_data, check_run, path_or_digits
from fathoms.cli.flags.parse import Switches, given, optional
from fathoms.errors import ConfigError, printable
from fathoms.text_table import plural, wrapped
from fathoms.training.job import Job, RunOptions, job_of, starting_point
from fathoms.training.recipe import Recipe
from fathoms.untrusted import read_toml

if TYPE_CHECKING:
    from fathoms.data.sources.splits import Roles
    from fathoms.training.run import Trainer

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
    "--compile": "--torchcompile",
}

USUAL = (
    *("data", "model", "recipe", "epochs", "batch_size", "lr", "image_size", "patch_size", "depth", "norm"),
    *("initial_checkpoint", "output", "experiment", "seed", "device", "dry_run", "json"),
)
"""What --help shows."""

RunFlags: Any = optional(RunOptions, "RunFlags", "Options of a run.", shows_defaults=True)
RecipeFlags: Any = optional(Recipe, "RecipeFlags", "Training options. Default: those of the recipe.")


@dataclass(frozen=True)
class Args:
    """Options of `fathoms train`."""

    data: tyro.conf.Positional[str | None] = None
    """Path of the data. Default: the built-in handwritten digits."""
    model: str | None = None
    """A name from `fathoms models`, or timm/NAME. Default: that of --initial-checkpoint, else the recipe's."""
    recipe: str | None = None
    """A name from `fathoms recipes`, or a TOML file. Default: `digits` without DATA; with DATA and without --model,
    `small_images`, with sizes that suit the images and the machine; beside --model, the values of `Recipe`."""
    json: bool = False
    """Print the summary as one JSON object on the last line."""
    run: RunFlags = field(default_factory=RunFlags)
    training: RecipeFlags = field(default_factory=RecipeFlags)
    switches: Switches = field(default_factory=Switches)
    config: str | None = None
    """Train what this file says, the config.toml of a run or what --dry-run prints; flags override it."""
    dry_run: bool = False
    """Print what would be trained as a file for --config, and stop."""


def run_options(args: Args) -> RunOptions:
    return args.run if isinstance(args.run, RunOptions) else RunOptions(**given(args.run))


def make_job(args: Args) -> Job:
    if args.config is not None:
        return configured_job(args, args.config)
    options, switches = given(args.training), given(args.switches)
    return job_of(args.data, args.model, args.recipe, options, switches, run_options(args))


def suited_job(args: Args) -> tuple[Job, Roles | None]:
    """The same; where the flags name neither recipe nor model, of a size that suits the data, which are then open."""
    run, options, switches = run_options(args), given(args.training), given(args.switches)
    if args.data is None or any((args.config, args.recipe, args.model, run.initial_checkpoint)):
        return make_job(args), None
    # Options that no run takes are refused before the data are opened.
    Recipe.join(starting_point("small_images", None).options, options)
    from fathoms.data.sources.splits import open_roles
    from fathoms.training.defaults import named_run, starting_table

    typed = {**options, **switches}
    run, roles = named_run(args.data, run, typed), open_roles(args.data, options.get("val_share"))
    table = starting_table(args.data, run, typed, roles)
    return job_of(args.data, None, table, options, switches, run), roles


def configured_job(args: Args, path: str) -> Job:
    """The job of a config file, overridden by flags."""
    for flag, value in (("--model", args.model), ("--recipe", args.recipe)):
        if value is not None:
            raise ConfigError(f"{flag}: --config names the model and has all options; leave one of them out")
    check_data(path, "--config", "give the config.toml of a run")
    flags = given(args.training), given(args.run), given(args.switches)
    job = Job.from_table(read_toml(path, ConfigError), path, *flags)
    return job if args.data is None else replace(job, data=path_or_digits(args.data))


def run(args: Args) -> int:
    if args.config is None:
        args = replace(args, data=path_or_digits(args.data))
    # A rank that refuses before it has joined leaves the others waiting.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone and args.config is None:
        check_run(run_options(args), args.data, given(args.training).get("teacher"))
    job, roles = suited_job(args)
    if alone and args.config is not None:
        check_run(job.run, job.data, job.recipe.teacher)
    from fathoms.verbs import run_job

    def check() -> None:
        if not alone:
            check_run(job.run, job.data, job.recipe.teacher)

    def say(summary: dict[str, Any]) -> None:
        print(json_format.dumps(summary) if args.json else closing(summary), flush=True)

    def plan(trainer: Trainer) -> None:
        print(planned(job, trainer.about(), args.json), flush=True)

    made = plan if args.dry_run else None
    outcome = run_job(job, roles, show=not args.dry_run, check=check, say=say, plan=made)
    return 0 if outcome is None else outcome.code


def planned(job: Job, about: list[str], json: bool) -> str:
    """What would be trained: a config file, under the lines that a run would begin with."""
    from fathoms.training.run_folder import to_toml

    if json:
        return json_format.dumps({**job.table(), "folder": str(job.folder)})
    return "\n".join([*(f"# {printable(line)}" for line in about), to_toml(job.table()).rstrip()])


FILES = (
    "report.html",
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "checkpoints/last",
    "checkpoints/best",
)


def scored(evaluation: dict[str, Any]) -> str:
    """An accuracy, and of how many images."""
    return f"{evaluation['top1']:.2f} % of {plural(evaluation['images'], 'image')}"


def closing(summary: dict[str, Any]) -> str:
    """The last printed lines: status, accuracy, files and the next command."""
    done = plural(summary["epoch"], "epoch")
    lines = [f"{summary['status']} after {done}, {summary['seconds']:.0f} s of training"]
    last, best, test, folder = (summary[key] for key in ("last", "best", "test", "folder"))
    if last is not None:
        lines.append(f"val accuracy {scored(last)}, last weights")
    if best is not None and best["epoch"] != summary["epoch"]:
        lines.append(f"val accuracy {scored(best)}, weights of epoch {best['epoch']}: checkpoints/best")
    if test is not None:
        lines.append(f"test accuracy {scored(test)}, last weights")
    if summary["reason"]:
        lines.append(summary["reason"])
    there = ", ".join(name for name in FILES if (Path(folder) / name).exists())
    lines += wrapped(f"run folder {folder}: {there}")
    if summary["status"] == "done":
        lines.append(f"next: fathoms validate --checkpoint {shlex.quote(folder)}")
    elif summary["status"] == "interrupted":
        place = f"in epoch {summary['epoch'] + 1}, after update {summary['updates']}"
        lines.append(f"next: give the same command again; it resumes {place}")
    return "\n".join(map(printable, lines))
