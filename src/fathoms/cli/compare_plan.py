"""The flags of `fathoms compare`; arms, seeds and runs that they, a preset and a plan file describe together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import Switches, given, merged, parse_setting, parse_settings
from fathoms.cli.flags.plan_flags import PlanFile, parse_arms, parse_axes
from fathoms.comparing.plan import Plan, parse_keep, parse_seeds
from fathoms.comparing.slurm import SlurmOptions, check_installed, parse_slurm
from fathoms.errors import ConfigError, FathomsError, flag_of
from fathoms.machine import visible_gpus
from fathoms.models.config import FIELDS
from fathoms.registry import check_name
from fathoms.training.job import Job, RunOptions
from fathoms.training.job import job_of as job_of_settings
from fathoms.training.recipe import RECIPE_FIELDS

if TYPE_CHECKING:
    from fathoms.comparing.in_process import Modules


@dataclass(frozen=True)
class Args:
    """Options of `fathoms compare`."""

    data: tyro.conf.Positional[str | None] = None
    """Where the data is; without it, the handwritten digits."""
    axis: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=VALUE,VALUE: an option of the model or the recipe, or model; may be given several times."""
    arm: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """"NAME: OPTION=VALUE,OPTION=VALUE": settings that go together; may be given several times."""
    preset: str | None = None
    """A comparison that the field argues about: norms, scaler, residual, placements, stem, cait, optimizers; those of
    the four documents: learnable_scaler, residual_by_depth, dual_patch_norm, cait_ablation."""
    plan: str | None = None
    """A TOML file with [axes], [arms], [tune], seeds, baseline, and the settings of all runs under [train]."""
    seeds: str | None = None
    """Seeds of each arm, such as 5; or the numbers of seeds at which the comparison is looked at and ends if every pair
    is decided, such as 3,5,10. Default: 5; where nothing says what to compare, 3."""
    keep_arms: str | None = None
    """ARMS@SEEDS: after so many seeds go on with so many of the best arms and the baseline, such as 3@3."""
    baseline: str | None = None
    """Compare every arm with this one, by its name; or, given a value of one axis such as norm=layernorm, with the arm
    that differs only in that. Without it, all pairs."""
    metric: str = "top1"
    """The measure that decides: top1, loss, or seconds-to=90, the seconds of training until val is at 90 %."""
    smallest_difference: float | None = None
    """Smallest difference that matters, in points, loss or seconds. Default, of points: twice the noise floor of the
    held-out set."""
    paired: bool = False
    """Pair runs by seed. Only for arms that start from the same weights, such as swaps of one checkpoint."""
    budget: str | None = None
    """Stop cleanly after this time, such as 25m or 8h; the same command continues."""
    by: str | None = None
    """Answer by this time, such as 8h or 17:30: of the plans that fit, by a pilot, the one that shows the smallest
    difference is printed, kept and run. The same command continues."""
    jobs: int = 0
    """Runs at a time on a CPU; 0: one for two cores, on the digits two."""
    per_gpu: int = 1
    """Runs that share a GPU; they run side by side only where NVIDIA's MPS runs, else in turns."""
    shard: str | None = None
    """Run only the K-th of N equal shares of the cells, written K/N, for schedulers other than Slurm."""
    slurm: str | None = None
    """Submit the runs as a Slurm job array: partition=NAME,gpus=1,time=4h, and cpus, mem, account, qos, constraint,
    cells. The same command later gathers results and submits only what is missing."""
    wait: bool = False
    """With --slurm: wait until no job of this comparison is queued or running."""
    keep: Literal["none", "last", "all"] = "last"
    """Checkpoints of a finished run that stay."""
    tune: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=VALUE,VALUE: try these values for each arm first, on val and on a seed apart; may be given several times."""
    tune_epochs: int | None = None
    """Epochs of each such trial. Default: those of a run."""
    robustness: tuple[str, ...] = ()
    """Further image sets, such as ImageNet-V2, that finished runs are measured on; no verdict or choice uses them."""
    scores: str | None = None
    """Judge runs trained elsewhere: a CSV file with the columns arm, seed, score and, where needed, status."""
    page: str | None = None
    """With --scores: write a page with the verdicts and the picture to this file."""
    dry_run: bool = False
    """Print the plan, with its expected time and disk, and run nothing."""
    no_pilot: bool = False
    """Leave out the pilot of --dry-run: a few timed updates of each architecture."""
    json: bool = False
    """Print the results as one JSON object on the last line."""
    model: str | None = None
    """A name from `fathoms models`, or timm/NAME; without it, the recipe's."""
    recipe: str | None = None
    """A name from `fathoms recipes`, or a TOML file."""
    run: RunOptions = field(default_factory=RunOptions)
    training: train_command.RecipeFlags = field(default_factory=train_command.RecipeFlags)
    switches: Switches = field(default_factory=Switches)


@dataclass(frozen=True)
class ArgsOfTable(Args):
    """The flags with a recipe that has no name: what suits the data and the machine."""

    recipe: Any = None


DEMO = Plan({"norm": ["layernorm", "rmsnorm"], "residual": ["none", "rezero"]}, seeds=3)
"""What is compared where nothing is named."""
DEMO_EPOCHS, DEMO_PROBES = 8, 24


def make_plan(args: Args, file: PlanFile | None = None) -> Plan:
    """The plan that flags, preset and file describe together."""
    if is_demo(args):
        tune = parse_axes(args.tune, "--tune")
        return with_seeds(args, dataclasses.replace(DEMO, tune=tune, tune_epochs=args.tune_epochs))
    base = Plan.from_dict({} if file is None else file.plan, args.plan or "--preset")
    axes = {**base.axes, **parse_axes(args.axis)}
    arms = {**base.arms, **parse_arms(args.arm)}
    tune = {**base.tune, **parse_axes(args.tune, "--tune")}
    if not axes and not arms:
        raise ConfigError("--axis: nothing is compared; give an axis, such as --axis norm=layernorm,dyt")
    tied = [name for arm in arms.values() for name in arm]
    for flag, names in (("--axis", axes), ("--arm", tied), ("--tune", tune)):
        for name in names:
            if name == "seed":
                raise ConfigError(f"{flag} seed: every arm has the same seeds; say how many with --seeds")
            check_name(name, (*FIELDS, *RECIPE_FIELDS, "model", "swap_norms"), "option", flag)
            if name == "val_share":
                raise ConfigError(f"{flag} val_share: all arms share one val split; give --val-share instead")
    epochs = base.tune_epochs if args.tune_epochs is None else args.tune_epochs
    return with_seeds(args, Plan(axes, arms, base.seeds, base.looks, base.keep, tune, epochs))


def with_seeds(args: Args, plan: Plan) -> Plan:
    """The plan with the seeds, the looks and the arms to keep of the flags."""
    looks = (plan.looks or (plan.seeds,)) if args.seeds is None else parse_seeds(args.seeds)
    keep = plan.keep if args.keep_arms is None else parse_keep(args.keep_arms, looks)
    return dataclasses.replace(plan, seeds=looks[-1], looks=looks if len(looks) > 1 else (), keep=keep)


def is_demo(args: Args) -> bool:
    """Whether nothing was said about what is to be compared."""
    return args.data is None and not (args.axis or args.arm or args.preset or args.plan)


def job_of(args: Args, settings: Mapping[str, str]) -> Job:
    """The run of an arm: the flags of all arms, and its own; `args.training` has the val share of all."""
    own = parse_settings(train_command, "train", settings)
    training = merged(args.training, own.training)
    if args.data is None and args.training.epochs is None and "epochs" not in settings:
        training = dataclasses.replace(training, epochs=DEMO_EPOCHS)
    switches = merged(args.switches, own.switches)
    model, run = own.model or args.model, dataclasses.replace(args.run, experiment=None)
    if is_demo(args) and run.probe_interval is None:
        run = dataclasses.replace(run, probe_interval=DEMO_PROBES)
    if own.run.swap_norms is not None:
        run = dataclasses.replace(run, swap_norms=own.run.swap_norms)
    return job_of_settings(args.data, model, args.recipe, given(training), given(switches), run)


def make_jobs(
    args: Args, plan: Plan, earlier: Mapping[str, Any], modules: Modules | None = None
) -> dict[str, tuple[dict[str, str], Job]]:
    """The settings and the run of every arm, earlier commands' first; two arms that are one run are an error."""
    arms = {**earlier.get("arms", {}), **{arm.name: arm.table() for arm in plan.variants()}}
    own = () if modules is None else modules.makers
    # The switches of all arms are those of named models; of a module they say the side of its images alone.
    bare = dataclasses.replace(args, switches=Switches())
    made = {name: (dict(s), job_of_arm(bare if name in own else args, name, s)) for name, s in arms.items()}
    made = made if modules is None else modules.put_into(made, given(args.switches))
    seen: dict[str, str] = {}
    for name, (_, job) in made.items():
        same = seen.setdefault(json.dumps(job.identity(), sort_keys=True), name)
        if same != name:
            raise ConfigError(f"arm {name!r}: the same run as {same!r}; leave one of them out")
    return made


def job_of_arm(args: Args, name: str, settings: Mapping[str, str]) -> Job:
    """The run of an arm; settings that contradict each other are refused with its name."""
    try:
        return job_of(args, settings)
    except FathomsError as error:
        raise ConfigError(f"arm {name!r}: {error}") from error


def make_tuning(args: Args, plan: Plan, earlier: Mapping[str, Any]) -> Any:
    """The grid of --tune, with the values of earlier commands; None without one."""
    from fathoms.comparing.tuning import Tuning

    before = earlier.get("tune", {})
    if not plan.tune and not before:
        return None
    names = dict.fromkeys([*before, *plan.tune])
    grid = {name: list(dict.fromkeys([*before.get(name, []), *plan.tune.get(name, [])])) for name in names}
    epochs = plan.tune_epochs if plan.tune else earlier.get("tune_epochs")
    return Tuning(grid, epochs, lambda name, settings: job_of_arm(args, name, settings))


def default_name(args: Args, plan: Plan) -> str:
    """A folder name that stays when seeds, values and arms are added, and when the data have moved."""
    shared = [args.model, args.recipe, given(args.training), given(args.switches), args.run.swap_norms]
    # Two presets of arms are two comparisons.
    arms = args.preset or bool(plan.arms)
    kept = json.dumps([*shared, args.run.initial_checkpoint, sorted(plan.axes), arms], sort_keys=True)
    stem = Path(args.data).name if args.data else "digits"
    return re.sub(r"[^\w.-]+", "_", f"compare-{stem}-{hashlib.sha256(kept.encode()).hexdigest()[:8]}")


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
