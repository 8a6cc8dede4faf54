"""Compare variants over seeds: train every cell, test the differences, say what they support.

Every combination of the axes is an arm; each arm is trained with the same seeds, data order, augmentation and budget.
Give the same command again to continue, with more seeds or values to extend. Any flag of `fathoms train` applies to
all arms. Without DATA it compares two norms and two residual scales on the handwritten digits.
"""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.cli import train as train_command
from fathoms.cli.compare_plan import (
    Args,
    ArgsOfTable,
    check_values,
    default_name,
    make_jobs,
    make_plan,
    make_tuning,
    refuse_idle_workers,
    refuse_unused,
    slurm_options,
)
from fathoms.cli.flags.early_checks import check_data, check_run, named_data, path_or_digits
from fathoms.cli.flags.parse import given, merged
from fathoms.cli.flags.plan_flags import (
    PlanFile,
    parse_axes,
    parse_budget,
    parse_shard,
    read_plans,
    refuse_void_flags,
    suited,
)
from fathoms.cli.terminal.live_output import live_table
from fathoms.comparing.plan import Plan, still_there
from fathoms.comparing.presets import PUBLISHED
from fathoms.comparing.slurm import SlurmOptions
from fathoms.errors import ConfigError, flag_of, printable
from fathoms.machine import command_words
from fathoms.text_table import for_terminal, plural

if TYPE_CHECKING:
    from fathoms.comparing.comparison import Comparison
    from fathoms.comparing.in_process import Modules

EXAMPLES = """
fathoms compare
fathoms compare cifar10.npz --recipe cifar --axis norm=layernorm,learnable_scaler --axis depth=12,24 --seeds 5
fathoms compare photos/ --preset residual --epochs 20 --budget 8h
fathoms compare photos/ --preset norms --slurm partition=gpu,gpus=1,time=4h
fathoms compare photos/ --arm "ln: norm=layernorm" --arm "ones: norm=learnable_scaler,norm_init=ones" --dry-run
"""
ALIASES = train_command.ALIASES
USUAL = (
    *("data", "axis", "arm", "preset", "plan", "seeds", "by", "budget", "tune", "baseline", "dry_run"),
    *("model", "recipe", "epochs", "image_size", "depth", "initial_checkpoint"),
    *("output", "experiment", "device", "json"),
)
"""What --help shows."""
DEMO_JOBS = 2


def with_plan_file(args: Args, file: PlanFile) -> Args:
    """The flags with the plan file's settings of all runs, where no flag says otherwise."""
    return dataclasses.replace(
        args,
        model=args.model or file.train.model,
        recipe=args.recipe or file.train.recipe,
        training=merged(file.train.training, args.training),
        switches=merged(file.train.switches, args.switches),
        baseline=args.baseline or file.baseline,
    )


def flags_of_all(args: Args) -> dict[str, Any]:
    """The options that flags give to all arms, of those that an axis can set."""
    apart = {"model": args.model, "swap_norms": args.run.swap_norms}
    named = {name: value for name, value in apart.items() if value is not None}
    return {**given(args.training), **given(args.switches), **named}


def with_val_share(args: Args) -> Args:
    """The flags with the share of val that a comparison takes from the training set."""
    if given(args.training).get("val_share") is not None:
        return args
    from fathoms.data.sources.splits import share_for_comparison

    training = dataclasses.replace(args.training, val_share=share_for_comparison(args.data))
    return dataclasses.replace(args, training=training)


def make_comparison(args: Args, modules: Modules | None = None) -> Comparison:
    """The comparison that the flags describe, with the arms and seeds that are in its folder already.

    `modules` makes the models of arms that Python code gives, which have no name.
    """
    args = dataclasses.replace(args, data=path_or_digits(args.data))
    refuse_unused(args)
    typed = flags_of_all(args)
    file = read_plans(args.preset, args.plan)
    args = args if file is None else with_plan_file(args, file)
    for place in args.robustness:
        check_data(place, "--robustness")
    check_run(args.run, args.data, given(args.training).get("teacher"))
    slurm = slurm_options(args)
    refuse_idle_workers(args, slurm)
    plan = make_plan(args, file)
    flags = flags_of_all(args)
    written = {
        name: f"{name} under [train] of {args.plan or args.preset}" for name in flags if name not in typed
    }
    refuse_void_flags(plan, flags, parse_axes(args.axis), written)
    check_values(plan)
    from fathoms.comparing.folder import ComparisonFolder

    args = with_val_share(args)
    folder = Path(args.run.output) / (args.run.experiment or default_name(args, plan))
    earlier = ComparisonFolder(folder).plan() or {}
    # What suits a named model, such as Muon, need not suit a module of Python code.
    table = suited(args, plan, earlier) if modules is None else None
    if table is not None:
        settings: dict[str, Any] = {**vars(args), "recipe": table}
        args = ArgsOfTable(**settings)
    if args.by is None:
        return build(args, plan, earlier, folder, slurm, modules)
    if modules is not None:
        raise ConfigError("by: modules of Python code have no pilot; give seeds")
    args, by = in_time(args, plan, earlier, folder)
    return build(args, make_plan(args, file), earlier, folder, by=by)


def build(
    args: Args,
    plan: Plan,
    earlier: Mapping[str, Any],
    folder: Path,
    slurm: SlurmOptions | None = None,
    modules: Modules | None = None,
    by: dict[str, Any] | None = None,
) -> Comparison:
    """The comparison of a plan, joined with what is in its folder; `by` is what --by chose."""
    from fathoms.comparing.by import described, refit
    from fathoms.comparing.comparison import Comparison, Options

    names = ("metric", "smallest_difference", "baseline", "paired", "keep", "per_gpu")
    seeds, looks, notes = seeds_of(args, plan, earlier)
    kept = earlier.get("keep_arms")
    options = Options(
        command=command_words(),
        jobs=args.jobs or (DEMO_JOBS if args.data is None else 0),
        shard=parse_shard(args.shard),
        seconds=parse_budget(args.budget),
        slurm=slurm,
        looks=looks,
        keep_arms=plan.keep or (kept and (kept[0], kept[1])),
        robustness=tuple(map(named_data, args.robustness)),
        by=by,
        refit=None if by is None else refit,
        **{name: getattr(args, name) for name in names},
    )
    tuning = make_tuning(args, plan, earlier)
    if tuning is not None and modules is not None:
        raise ConfigError(f"tune: arm {min(modules.makers)!r} is a module: those are not tuned; leave it out")
    notes += [*still_there(plan, earlier), *PUBLISHED.get(str(args.preset), ())]
    notes += [] if by is None else [described(by)]
    return Comparison(make_jobs(args, plan, earlier, modules), seeds, folder, options, tuning, notes, modules)


def in_time(args: Args, plan: Plan, earlier: Mapping[str, Any], folder: Path) -> tuple[Args, dict[str, Any]]:
    """The flags with what fits into the time of --by, and that as plan.json keeps it; a plan that is there stays."""
    from fathoms.comparing.by import flags_for, until

    began, chosen = time.monotonic(), earlier.get("by")
    seconds = until(str(args.by), datetime.now()) or parse_budget(args.by, "--by") or 0.0
    if earlier and chosen is None:
        raise ConfigError(f"--by: {folder} was planned without it; leave it out, or give --budget {args.by}")
    if chosen is None:
        draft = build(args, plan, {}, folder)
        draft.check()
        print("timing a moment of each architecture, to see what fits into the time", file=sys.stderr)
        options = {*plan.axes, *plan.tune, *(name for arm in plan.arms.values() for name in arm)}
        fixed = given(args.training).get("epochs") is not None or "epochs" in options
        chosen = flags_for(draft, seconds, fixed)
        args = dataclasses.replace(args, seeds=chosen["seeds"], keep_arms=chosen["keep_arms"])
    shorter = {"epochs": chosen["epochs"]} if "epochs" in chosen else {}
    left = max(1.0, seconds - (time.monotonic() - began))
    changed = {"training": dataclasses.replace(args.training, **shorter), "budget": f"{left:.0f}s"}
    tune = (chosen["tune"],) if "tune" in chosen else args.tune
    return dataclasses.replace(args, tune=tune, **changed), chosen


def seeds_of(args: Args, plan: Plan, earlier: Mapping[str, Any]) -> tuple[int, tuple[int, ...], list[str]]:
    """The seeds of each arm, which a later command never lowers, the looks, and lines on what it asks for otherwise."""
    there, looks = earlier.get("seeds", 0), tuple(earlier.get("looks") or ())
    if args.seeds is None and (args.plan is None or args.by is not None) and there:
        return there, looks, []
    if plan.seeds < there:
        what = f"--seeds {args.seeds}" if args.seeds is not None else f"seeds = {plan.seeds} of {args.plan}"
        said = f"the plan has {plural(there, 'seed')} of each arm: {what} takes none of them away"
        return there, looks, [said]
    return plan.seeds, plan.looks, []


READ_WITH_SCORES = ("scores", "page", "baseline", "metric", "smallest_difference", "paired", "json")
"""Flags of `compare` that say how scores are compared; the others say how runs are trained."""


def print_verdicts(args: Args, scores: str) -> int:
    """Judge the scores of a CSV file, and print the answer and the table, or one JSON object; and write a page."""
    for each in dataclasses.fields(args):
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if each.name not in READ_WITH_SCORES and getattr(args, each.name) != default:
            flag = (
                flag_of(each.name) if each.name not in ("data", "run", "training", "switches") else each.name
            )
            raise ConfigError(f"{flag}: nothing is trained with --scores; leave it out")
    check_data(scores, "--scores")
    if args.page is not None and Path(args.page).exists():
        raise ConfigError(f"--page {args.page}: is there already; give another name")
    from fathoms.comparing.before_runs import check_metric
    from fathoms.comparing.scores import judge

    check_metric(args.metric, timed=True)
    found = judge(
        scores,
        baseline=args.baseline,
        smallest_difference=args.smallest_difference,
        higher_is_better=args.metric == "top1",
        paired=args.paired,
    )
    text = json_format.dumps(found.to_json()) if args.json else repr(found)
    print("\n".join(map(printable, text.splitlines())))
    if args.page is not None:
        from fathoms.report.page import write_scores_page

        page = write_scores_page(found, Path(scores).name, Path(args.page))
        print(printable(f"written: {page}"), file=sys.stderr)
    return 0


def run(args: Args) -> int:
    if args.scores is not None:
        return print_verdicts(args, args.scores)
    comparison = make_comparison(args)
    from fathoms.comparing.comparison import UNFINISHED
    from fathoms.comparing.dry_run import describe, estimate
    from fathoms.report.page import write_report

    comparison.check()
    print(for_terminal(describe(comparison, hours=args.dry_run)), flush=True)
    if args.dry_run:
        pilot = not (args.no_pilot or args.by)
        print(estimate(comparison, lambda line: print(line, file=sys.stderr), pilot))
        return 0
    with live_table(sys.stdout.isatty() and args.slurm is None) as (say, show):
        results, code = comparison.run(say, show)
    write_report(comparison.folder.path)
    table = (comparison.folder.path / "table.md").read_text()
    print(json_format.dumps(results) if args.json else for_terminal(table))
    # Above 128: ended by a signal.
    if code == UNFINISHED or code > 128:
        cut = "" if code == UNFINISHED else "interrupted: "
        print(f"{cut}runs are left; give the same command again to continue", file=sys.stderr)
    return code
