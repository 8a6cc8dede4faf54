"""Swap the norms of a model: keep, reset or calibrate their learned scales and shifts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fathoms.errors import FathomsError, reason
from fathoms.models.vit import ViT
from fathoms.parts.modes import in_inference
from fathoms.registry import check_name
from fathoms.surgery.inputs import (
    REFUSALS,
    Inputs,
    as_batches,
    call,
    check_model,
    difference,
    known_inputs,
    run,
    size_of,
    with_size,
)
from fathoms.surgery.new_norm import NewNorm, build_part, errors_of, fit_in_order, start_of
from fathoms.surgery.norm_sites import Choice, Norms, NormSite, choose_sites, find_norms
from fathoms.surgery.trial import Report, check_comparable, exchanged, proof_notes, zeros_at_random
from fathoms.text_table import aligned


@dataclass(frozen=True)
class SwapRow:
    """One swapped norm.

    Args:
        name: Path in the model.
        old: Class of the old norm.
        new: Name of the new norm.
        parameters: Number of its parameters, before and after.
        fit_error: Relative error of the new norm's outputs on the batches; None without batches.
        note: Which parameters of the old norm have no place in the new one.
    """

    name: str
    old: str
    new: str
    parameters: tuple[int, int]
    fit_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class SwapReport(Report):
    """The result of `swap_norms`.

    Args:
        rows: One for each site, in the order of the modules.
        how: "keep", "reset" or "calibrate".
        left: Path of each norm that stays, and the reason; also where a norm is called as a function.
        output_change: Largest difference of the model's output over its largest value, on the batches given.
        notes: What was not tried, and what the comparison did not prove.
    """

    rows: tuple[SwapRow, ...]
    how: str
    left: tuple[tuple[str, str], ...] = ()
    output_change: float | None = None
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """How many norms were swapped, and which stay and why, in one line."""
        left = "; ".join(f"{name or 'the model'} {why}" for name, why in self.left)
        return f"{len(self.rows)} norms swapped" + (f", {len(self.left)} left: {left}" if left else "")

    def table(self) -> str:
        """One line for each site, then the change of the output."""
        header = ("site", "old", "new", "parameters", "fit error", "note")
        rows = []
        for row in self.rows:
            counts = f"{row.parameters[0]} -> {row.parameters[1]}"
            error = "" if row.fit_error is None else f"{row.fit_error:.3g}"
            rows.append((row.name, row.old, row.new, counts, error, row.note))
        rows += [(name or "the model", "left", "", "", "", why) for name, why in self.left]
        stay = f", {len(self.left)} left" if self.left else ""
        lines = [aligned(header, rows), f"{len(self.rows)} norms swapped ({self.how}){stay}"]
        if self.output_change is not None:
            lines.append(f"output changed by {self.output_change:.3g} of its largest value")
        return "\n".join([*lines, *self.notes])


WAYS = ("keep", "reset", "calibrate")

# Another order of summation moves the output from run to run by less; then the pairs of a fit belong together.
REPEATS = 1e-2


def swap_norms(
    model: nn.Module,
    to: str,
    *,
    only: Choice | None = None,
    calibrate: Any = None,
    how: str | None = None,
    init: str | float | None = None,
) -> SwapReport:
    """Replace a model's norms by the norm `to`, in place.

    "keep" copies each norm's learned scale and shift into the new one; a LearnableScaler also takes in a
    BatchNorm's running statistics, which makes that swap exact. "reset" starts the new norms afresh.
    "calibrate" fits each new norm to the old norm's outputs on the batches. In place of a frozen norm, the new one
    is frozen too.

    Args:
        model: Any module, of fathoms or not.
        to: Name of a norm: see `fathoms parts norm`.
        only: Shell patterns over the names of modules, block indices or a range of them, or a function of
            a `NormSite`; None takes every norm that is not a `to` already.
        calibrate: A batch of images, or an iterable of batches. With how="keep" or "reset" they only
            measure how much the output changes.
        how: "keep", "reset" or "calibrate"; None calibrates if there are batches, and keeps otherwise.
        init: Start of the new norms, which resets them: "normal", as its authors have it, or "ones" of
            learnable_scaler, alpha of dyt and derf. None: "ones", or the norm's own. `to` may hold it, as
            "learnable_scaler:normal".

    >>> from fathoms import create_model
    >>> vit = create_model("vit_digits", depth=2, num_classes=10)
    >>> len(swap_norms(vit, "learnable_scaler", only="blocks.*"))
    4
    """
    check_model(model, "swap_norms")
    to, init, how = start_of(to, init, how)
    batches = None if calibrate is None else as_batches(calibrate, model)
    how = check_name(how or ("keep" if batches is None else "calibrate"), WAYS, "way", "swap_norms: how")
    if how == "calibrate" and batches is None:
        raise FathomsError("swap_norms: how='calibrate' needs batches; pass calibrate=")
    inputs = known_inputs(model) if batches is None else with_size(batches[0], min(2, size_of(batches[0])))
    found = find_norms(model, inputs)
    sites = _sites(model, to, only, found, how)
    if batches is not None:
        check_comparable(model, batches[0], "swap_norms", REPEATS, "leave calibrate= out")
    new = [build_part(site, to, model, init, keep=how == "keep") for site in sites]
    pairs = [(each.site.module, each.module) for each in new]
    teacher = model if batches is None else copy.deepcopy(model)
    before, shared = _failures(model, inputs), _shared(model, sites)
    errors: dict[str, float] = {}
    change, proof = None, ()
    with exchanged(model, pairs):
        for way, why in _failures(model, inputs).items():
            if way not in before:
                failed = f"after the swap the model fails in {way} ({why})"
                raise FathomsError(f"swap_norms: {failed}; it is as it was; choose other norms with only=")
        if batches is not None:
            if how == "calibrate":
                fit_in_order(model, teacher, new, batches)
            errors = errors_of(model, teacher, new, batches)
            change, proof = _compared(teacher, model, batches)
    rows = tuple(_row(each, to, errors.get(each.site.name)) for each in new)
    stay = [site for site in found.rows if site not in sites]
    left = [(s.name, f"is a {to} already" if s.kind == to else "not chosen by only=") for s in stay]
    untried = [f"not tried in {way} after the swap: {why}" for way, why in before.items()]
    notes = [*_after(model, to, init), *found.notes, *untried, *shared, *proof]
    return SwapReport(rows, how, (*found.left, *left), change, tuple(notes))


def _failures(model: nn.Module, inputs: Inputs | None) -> dict[str, str]:
    """Reasons for which a model does not run in inference, or forward and backward in training; empty if it does."""
    if inputs is None:
        return {"inference and training": "the inputs of the model are not known; pass calibrate="}
    failures, state = {}, {name: value.clone() for name, value in model.named_buffers()}
    with torch.random.fork_rng(), in_inference(model):
        for way in ("inference", "training"):
            try:
                with torch.set_grad_enabled(way == "training"):
                    ends = call(model.train(way == "training"), inputs)
                if ends := [tensor.float().sum() for tensor in ends if tensor.requires_grad]:
                    learned = [p for p in model.parameters() if p.requires_grad]
                    torch.autograd.grad(ends, learned, allow_unused=True)
            except REFUSALS as error:
                failures[way] = reason(error)
                read = getattr(error, "obj", None)
                if isinstance(error, AttributeError) and isinstance(read, nn.Module):
                    kind = type(read).__name__
                    failures[way] = f"its own code reads {error.name} of a {kind}, which has none"
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(state[name])
    return failures


def _compared(teacher: nn.Module, model: nn.Module, batches: list[Inputs]) -> tuple[float, tuple[str, ...]]:
    """The change of the output on the batches, and what it did not prove."""

    def change() -> float:
        return max(difference(run(teacher, batch), run(model, batch)) for batch in batches)

    largest = change()
    with zeros_at_random(teacher, model) as zeros:
        largest = max(largest, change()) if zeros else largest
        return largest, proof_notes(zeros, teacher, batches[0])


def _sites(model: nn.Module, to: str, only: Choice | None, found: Norms, how: str) -> list[NormSite]:
    """The norms to be swapped; an error with the reason if there are none, or one that is no map of each row."""
    name = type(model).__name__
    if any(site.module is model for site in found.rows):
        why = f"{name} is itself a norm; put it into nn.Sequential, or build the new one"
    elif found.rows:
        sites = [site for site in choose_sites(found, only) if site.kind != to]
        moving = [site.name for site in sites if site.form.by_batch and site.module.training]
        if moving and how != "reset":
            raise FathomsError(
                f"{moving[0]}: a BatchNorm in training mode depends on the batch and is not a fixed map; "
                "call model.eval() first, or use how='reset'"
            )
        if sites:
            return sites
        why = f"every norm of {name} is a {to} already; there is nothing to swap"
    elif getattr(model, "folded_by_fathoms", False):
        why = f"{name} was folded and has no norm left; swap before folding"
    elif found.left:
        (place, first), more = found.left[0], len(found.left) - 1
        others = f"; so with {more} more, see fathoms.norms(model)" if more else ""
        why = f"no norm of {name} can be swapped: {place or name}: {first}{others}"
    else:
        unseen = f" ({found.notes[0]})" if found.notes else ""
        why = f"{name} has no norm among its modules; there is nothing to swap{unseen}"
    raise FathomsError(f"swap_norms: {why}")


def _row(new: NewNorm, to: str, error: float | None) -> SwapRow:
    site = new.site
    counts = [sum(p.numel() for p in module.parameters()) for module in (site.module, new.part)]
    note = "; ".join(filter(None, ("never ran on these inputs" if site.ran is False else "", new.note)))
    return SwapRow(site.name, type(site.module).__name__, to, (counts[0], counts[1]), error, note)


def _shared(model: nn.Module, sites: list[NormSite]) -> list[str]:
    """A note on each parameter that a norm shares with another module, and its successor does not."""
    holders: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            holders.setdefault(parameter, []).append(name)
    own = {parameter for site in sites for parameter in site.module.parameters(recurse=False)}
    tied = [names for parameter, names in holders.items() if parameter in own and len(names) > 1]
    return [f"{' and '.join(names)} were one parameter, and are no longer" for names in tied]


def _after(model: nn.Module, to: str, init: str | float | None) -> list[str]:
    """Adopt the config that describes a swapped model of fathoms; a note if there is none."""
    if not isinstance(model, ViT):
        return []
    own = {name: parameter.shape for name, parameter in model.named_parameters()}
    change = {"norm": to, "norm_init": init, "norm_by_depth": None, "final_norm": None}
    # Norms of q and k have their own field, which takes fewer of them.
    heads = [{"qk_norm": to}] if to in ("layernorm", "rmsnorm") else []
    for more in ({}, *heads):
        try:
            config = model.config.replace(**change, **more)
            with torch.device("meta"):
                twin = ViT(config)
        except FathomsError:
            continue
        if {name: parameter.shape for name, parameter in twin.named_parameters()} == own:
            model.config = config
            return []
    return ["config: no ViTConfig describes this mixture; model.config still names the old norms"]
