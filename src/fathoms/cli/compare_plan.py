"""Arms, seeds and runs of a comparison, from flags, preset and plan file together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.cli import train as train_command
from fathoms.cli.flags.parse import Switches, given, merged, parse_settings
from fathoms.cli.flags.plan_flags import PlanFile, parse_arms, parse_axes
from fathoms.comparing.plan import Plan, parse_keep, parse_seeds
from fathoms.errors import ConfigError, FathomsError
from fathoms.models.config import FIELDS
from fathoms.registry import check_name
from fathoms.training.job import Job
from fathoms.training.job import job_of as job_of_settings
from fathoms.training.recipe import RECIPE_FIELDS

if TYPE_CHECKING:
    from fathoms.cli.compare import Args
    from fathoms.comparing.in_process import Modules

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
