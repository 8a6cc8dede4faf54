"""Unused options: a table of the condition under which each is read, and the refusal of those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fathoms.errors import ConfigError, flag_of
from fathoms.names.optimizers import WITH_BETAS, WITH_MOMENTUM
from fathoms.text_table import one_of

ENDING = ("cosine", "wsd", "custom")
"""Schedules that reach the minimum learning rate at their end."""


@dataclass(frozen=True)
class Use:
    """Options that are read only under a condition, with the condition in words."""

    names: tuple[str, ...]
    read: Callable[[Any], bool]
    needs: str


USES = (
    Use(("momentum",), lambda r: r.opt in WITH_MOMENTUM, f"--opt {one_of(WITH_MOMENTUM)}"),
    Use(("opt_betas", "opt_eps"), lambda r: r.opt in WITH_BETAS, f"--opt {one_of(WITH_BETAS)}"),
    Use(("warmup_lr", "warmup_prefix"), lambda r: r.warmup_epochs > 0, "--warmup-epochs"),
    Use(("min_lr",), lambda r: r.sched != "constant", "a --sched that decays"),
    Use(("cooldown_epochs",), lambda r: r.sched in ENDING, f"--sched {one_of(ENDING)}"),
    Use(("decay_epochs",), lambda r: r.sched in ("step", "wsd"), "--sched step or wsd"),
    Use(("decay_rate",), lambda r: r.sched == "step", "--sched step"),
    Use(("epoch_factor", "epoch_threshold"), lambda r: r.sched == "custom", "--sched custom"),
    Use(
        ("sched_on_updates",),
        lambda r: r.sched != "constant" or r.warmup_epochs > 0,
        "a learning rate that changes: another --sched, or --warmup-epochs",
    ),
    Use(("bce_sum", "bce_target_thresh"), lambda r: r.bce_loss, "--bce-loss"),
    Use(("mixup_prob", "mixup_mode"), lambda r: bool(r.mixup or r.cutmix), "--mixup or --cutmix"),
    Use(("mixup_switch_prob",), lambda r: bool(r.mixup and r.cutmix), "both --mixup and --cutmix"),
    Use(("remode", "recount"), lambda r: r.reprob > 0, "--reprob"),
    Use(("crop_padding",), lambda r: r.crop == "pad", "--crop pad"),
    Use(("scale", "ratio"), lambda r: r.crop == "resized", "--crop resized"),
    Use(("attn_extra_loss_layers",), lambda r: r.attn_extra_loss > 0, "--attn-extra-loss"),
    Use(("distillation_alpha",), lambda r: r.distillation_type != "none", "--distillation-type"),
    Use(("distillation_tau",), lambda r: r.distillation_type == "soft", "--distillation-type soft"),
    Use(("model_ema_decay", "model_ema_warmup"), lambda r: r.model_ema, "--model-ema"),
    Use(
        ("amp_dtype",),
        lambda r: r.amp or r.precision not in ("auto", "fp32"),
        "--amp or --precision autocast",
    ),
    Use(("amp",), lambda r: r.precision == "auto", "--precision to be left out"),
    Use(("compile_scope",), lambda r: r.torchcompile != "none", "--torchcompile"),
)


def unused(options: Any) -> dict[str, str]:
    """Options that would not be read, each with what it needs."""
    return {name: use.needs for use in USES if not use.read(options) for name in use.names}


def refuse_unused(options: Any, given: Iterable[str]) -> None:
    """Raise for an option that would not be used.

    Args:
        options: A recipe, or anything with its fields.
        given: Names of the options the user gave.
    """
    idle = unused(options)
    for name in given:
        if name == "amp" and name in idle:
            flag = "--amp" if options.amp else "--no-amp"
            raise ConfigError(f"{flag} and --precision decide the same; leave one of them out")
        if name in idle:
            raise ConfigError(
                f"{flag_of(name)} would not be used: it needs {idle[name]}; add that or leave it out"
            )


def without_idle(defaults: dict[str, Any], base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The options of a recipe file, overridden by flags.

    An option of the file that the flags leave unused is dropped, such as the decay of the average under
    --no-model-ema, and so is a precision that --amp or --no-amp decides; a flag that would not be used is refused.

    Args:
        defaults: Every option's default.
        base: The options of the file.
        given: The flags.
    """
    if given.get("amp") is not None:
        base = {name: value for name, value in base.items() if name != "precision"}
    options = SimpleNamespace(**{**defaults, **base, **given})
    refuse_unused(options, [name for name, value in given.items() if value is not None])
    idle = unused(options)
    return {name: value for name, value in {**base, **given}.items() if name not in idle}
