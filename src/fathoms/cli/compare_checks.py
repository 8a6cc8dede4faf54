"""Refuses flags of `fathoms compare` that no run would read, and values that no run takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import parse_setting
from fathoms.comparing.plan import Plan
from fathoms.comparing.slurm import SlurmOptions, check_installed, parse_slurm
from fathoms.errors import ConfigError, flag_of
from fathoms.machine import visible_gpus
from fathoms.training.job import RunOptions

if TYPE_CHECKING:
    from fathoms.cli.compare import Args


def check_values(plan: Plan) -> None:
    """Refuse a value of an axis or of the tuning that no run takes, with the flag and the value that were typed."""
    for flag, table in (("--tune", plan.tune), ("--axis", plan.axes)):
        for name, values in table.items():
            for value in values:
                parse_setting(train_command, "train", (name, value), flag)


def refuse_unused(args: Args) -> None:
    """Refuse flags that a comparison decides itself, and counts below their least."""
    if args.run.seed != RunOptions().seed:
        raise ConfigError("--seed: a comparison counts its seeds from 0; use --seeds")
    for flag, value in (("--resume", args.run.resume != "auto"), ("--allow-change", args.run.allow_change)):
        if value:
            raise ConfigError(f"{flag}: a comparison resumes its runs itself; leave it out")
    for flag, count, least in (("--jobs", args.jobs, 0), ("--per-gpu", args.per_gpu, 1)):
        if count < least:
            raise ConfigError(f"{flag} {count}: use {least} or more")
    alone = {
        "--no-pilot": args.no_pilot and not args.dry_run and "--dry-run",
        "--page": args.page and "--scores",
    }
    for flag, other in alone.items():
        if other:
            raise ConfigError(f"{flag} would not be used: it belongs to {other}; leave it out")
    _refuse_beside_by(args)
    if args.json and args.dry_run:
        raise ConfigError("--json would not be used: --dry-run has no results; leave it out")


def _refuse_beside_by(args: Args) -> None:
    """Refuse flags of what the time of --by decides."""
    for name in ("seeds", "keep_arms", "budget", "shard", "slurm", "no_pilot") if args.by else ():
        if getattr(args, name):
            raise ConfigError(
                f"{flag_of(name)}: --by decides what fits into the time; leave one of the two out"
            )


def refuse_idle_workers(args: Args, slurm: SlurmOptions | None) -> None:
    """Refuse a number of runs at a time for devices that these runs are not on."""
    if slurm is not None and ":" in args.run.device:
        raise ConfigError(f"--device {args.run.device}: Slurm chooses the GPUs; use --device cuda")
    gpus = slurm.gpus if slurm is not None else len(visible_gpus(args.run.device))
    if gpus and args.jobs:
        raise ConfigError(f"--jobs {args.jobs} would not be used: the runs are on GPUs; use --per-gpu")
    if not gpus and args.per_gpu > 1:
        raise ConfigError(f"--per-gpu {args.per_gpu} would not be used: the runs are on the CPU; use --jobs")


def slurm_options(args: Args) -> SlurmOptions | None:
    """The options of --slurm; flags that it leaves without effect are errors."""
    if args.slurm is None and args.wait:
        raise ConfigError("--wait would not be used: it needs --slurm; leave it out")
    if args.slurm is None:
        return None
    if args.budget is not None:
        raise ConfigError("--budget would not be used with --slurm; write the time limit there: time=4h")
    options = parse_slurm(args.slurm, args.wait)
    if not args.dry_run:
        check_installed()
    return options
