"""Swap the norms of a model: keep, reset or calibrate their learned scales and shifts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fathoms.errors import FathomsError, reason
from fathoms.models.vit import ViT
from fathoms.parts.norms import NORMS
from fathoms.registry import check_name
from fathoms.surgery.inputs import (
    REFUSALS,
    Inputs,
    Report,
    as_batches,
    call,
    check_comparable,
    check_model,
    difference,
    first,
    proof_notes,
    run,
    zeros_at_random,
)
from fathoms.surgery.new_norm import (
    NewNorm,
    as_start,
    build_part,
    carry,
    fit,
    record_pairs,
    replace_module,
    resets,
    running_order,
)
from fathoms.surgery.norm_sites import Choice, Norms, NormSite, choose_sites, find_norms, known_inputs
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

# A gain and a shift of each channel go through any two rows.
ENOUGH_ROWS = 8


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
    to, _, start = to.partition(":") if isinstance(to, str) else (to, "", "")
    NORMS.check(to, "swap_norms")
    init = as_start(start) if start else init
    how = resets(to, how) if init is not None else how
    batches = None if calibrate is None else as_batches(calibrate, model)
    how = check_name(how or ("keep" if batches is None else "calibrate"), WAYS, "way", "swap_norms: how")
    if how == "calibrate" and batches is None:
        raise FathomsError("swap_norms: how='calibrate' needs batches; pass calibrate=")
    inputs = known_inputs(model) if batches is None else first(batches[0], 2)
    found = find_norms(model, inputs)
    sites = _sites(model, to, only, found)
    if batches is not None:
        check_comparable(model, batches[0], "swap_norms", REPEATS, "leave calibrate= out")
    if how != "reset":
        _refuse_training_batchnorm(sites)
    new = {site.name: build_part(site, to, model, init) for site in sites}
    if how == "keep":
        new = {site.name: carry(site, new[site.name]) for site in sites}
    for site in sites:
        new[site.name].module.train(site.module.training)
    errors: dict[str, float] = {}
    change, proof, notes, shared = None, (), [], _shared(model, sites)
    teacher = None if batches is None else copy.deepcopy(model)
    try:
        if batches is None or teacher is None or how != "calibrate":
            _exchange(model, sites, new)
        else:
            errors = _fit_in_order(model, teacher, sites, new, batches)
        if failures := _failures(model, inputs):
            _exchange(model, sites, new, back=True)
            own = _failures(model, inputs)
            _refuse_new(failures, own)
            notes = [f"not tried in {way} after the swap: {why}" for way, why in own.items()]
            _exchange(model, sites, new)
        if batches is not None and teacher is not None:
            errors = errors or _errors(model, teacher, sites, new, batches)
            change, proof = _compared(teacher, model, batches)
    except BaseException:
        _exchange(model, sites, new, back=True)
        raise
    rows = tuple(_row(site, to, new[site.name], errors.get(site.name)) for site in sites)
    chosen = {site.name for site in sites}
    stays = [(s.name, f"is a {to} already" if s.kind == to else "not chosen by only=") for s in found.sites]
    left = (*found.left, *[pair for pair in stays if pair[0] not in chosen])
    notes = [*_after(model, to, init), *found.notes, *notes, *shared, *proof]
    return SwapReport(rows, how, left, change, tuple(notes))


def _exchange(model: nn.Module, sites: list[NormSite], new: dict[str, NewNorm], back: bool = False) -> None:
    """Put the new norms in, or the old ones back."""
    for site in sites:
        pair = site.module, new[site.name].module
        replace_module(model, *(reversed(pair) if back else pair))


def _failures(model: nn.Module, inputs: Inputs | None) -> dict[str, str]:
    """Reasons for which a model does not run in inference, or forward and backward in training; empty if it does."""
    if inputs is None:
        return {"inference and training": "the inputs of the model are not known; pass calibrate="}
    failures = {}
    state = {name: value.clone() for name, value in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng():
        for way in ("inference", "training"):
            try:
                model.train(way == "training")
                with torch.set_grad_enabled(way == "training"):
                    ends = [tensor.float().sum() for tensor in call(model, inputs) if tensor.requires_grad]
                learned = [p for p in model.parameters() if p.requires_grad]
                if ends:
                    torch.autograd.grad(ends, learned, allow_unused=True)
            except REFUSALS as error:
                failures[way] = reason(error)
    for module, mode in modes.items():
        module.training = mode
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(state[name])
    return failures


def _refuse_new(after: dict[str, str], before: dict[str, str]) -> None:
    for way in (way for way in after if way not in before):
        raise FathomsError(
            f"swap_norms: after the swap the model fails in {way} ({after[way]}); it is as it was; choose "
            "other norms with only="
        )


def _compared(teacher: nn.Module, model: nn.Module, batches: list[Inputs]) -> tuple[float, tuple[str, ...]]:
    """The change of the output on the batches, and what it did not prove."""

    def change() -> float:
        return max(difference(run(teacher, batch), run(model, batch)) for batch in batches)

    largest = change()
    with zeros_at_random(teacher, model) as zeros:
        largest = max(largest, change()) if zeros else largest
        return largest, proof_notes(zeros, teacher, batches[0])


def _sites(model: nn.Module, to: str, only: Choice | None, found: Norms) -> list[NormSite]:
    """The norms to be swapped; an error with the reason if there are none."""
    name = type(model).__name__
    if any(site.module is model for site in found.sites):
        raise FathomsError(
            f"swap_norms: {name} is itself a norm; put it into nn.Sequential, or build the new one"
        )
    if found.sites:
        sites = [site for site in choose_sites(found, only) if site.kind != to]
        if not sites:
            raise FathomsError(
                f"swap_norms: every norm of {name} is a {to} already; there is nothing to swap"
            )
        return sites
    if getattr(model, "folded_by_fathoms", False):
        raise FathomsError(f"swap_norms: {name} was folded and has no norm left; swap before folding")
    if found.left:
        place, why = found.left[0]
        more = (
            f"; so with {len(found.left) - 1} more, see fathoms.norms(model)" if len(found.left) > 1 else ""
        )
        raise FathomsError(f"swap_norms: no norm of {name} can be swapped: {place or name}: {why}{more}")
    unseen = f" ({found.notes[0]})" if found.notes else ""
    raise FathomsError(f"swap_norms: {name} has no norm among its modules; there is nothing to swap{unseen}")


def _refuse_training_batchnorm(sites: list[NormSite]) -> None:
    for site in sites:
        if site.form.by_batch and site.module.training:
            raise FathomsError(
                f"{site.name}: a BatchNorm in training mode depends on the batch and is not a fixed map; "
                "call model.eval() first, or use how='reset'"
            )


def _fit_in_order(
    model: nn.Module,
    teacher: nn.Module,
    sites: list[NormSite],
    new: dict[str, NewNorm],
    batches: list[Inputs],
) -> dict[str, float]:
    """Fit and swap the sites in the order in which they run; the error of each on the batches."""
    originals = dict(teacher.named_modules())
    by_name = {site.name: site for site in sites}
    errors: dict[str, float] = {}
    for name in running_order(model, {site.name: site.module for site in sites}, batches[0]):
        site, part = by_name[name], new[name]
        trio = (site.form, originals[name], site.module)
        try:
            pairs = [
                pair for batch in batches for pair in record_pairs(teacher, model, {name: trio}, batch)[name]
            ]
        except REFUSALS as error:
            _refuse_new({"calibration": reason(error)}, {})
            raise
        _refuse_few_rows(name, part.part, [x for x, _ in pairs])
        errors[name] = fit(part.part, pairs)
        replace_module(model, site.module, part.module)
    return errors


def _refuse_few_rows(name: str, part: nn.Module, inputs: list[torch.Tensor]) -> None:
    """Refuse a fit that its rows do not determine: it is exact on them, with gains that mean nothing."""
    seen = sum(map(len, inputs))
    few, one = seen < ENOUGH_ROWS, inputs[0][0]
    # A matrix gives equal rows of a batch equal numbers but for rounding.
    if list(part.parameters()) and (
        few or all(torch.allclose(x, one, atol=1e-6 * float(one.abs().max())) for x in inputs)
    ):
        why = f"fewer than the {ENOUGH_ROWS} that a fit needs" if few else "all the same"
        raise FathomsError(
            f"swap_norms: {name} sees {seen} rows of calibrate=, {why}; give more images, or how='keep'"
        )


@torch.no_grad()
def _errors(
    model: nn.Module,
    teacher: nn.Module,
    sites: list[NormSite],
    new: dict[str, NewNorm],
    batches: list[Inputs],
) -> dict[str, float]:
    """Relative error of each new norm, as it is, against the old norm's outputs; none for one that never runs."""
    originals = dict(teacher.named_modules())
    trios = {site.name: (site.form, originals[site.name], new[site.name].module) for site in sites}
    sums = {site.name: [0.0, 0.0] for site in sites}
    for batch in batches:
        for name, pairs in record_pairs(teacher, model, trios, batch).items():
            part = copy.deepcopy(new[name].part).double()
            for x, y in pairs:
                sums[name][0] += float((y - part(x)).square().sum())
                sums[name][1] += float(y.square().sum())
    return {name: (missed / whole) ** 0.5 for name, (missed, whole) in sums.items() if whole > 0.0}


def _row(site: NormSite, to: str, new: NewNorm, error: float | None) -> SwapRow:
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
    """Update a fathoms model's config; the note says where none describes the model."""
    if not isinstance(model, ViT) or _follow(model, to, init):
        return []
    return ["config: no ViTConfig describes this mixture; model.config still names the old norms"]


def _follow(model: ViT, to: str, init: str | float | None) -> bool:
    """Adopt the config that describes the swapped model, if there is one."""
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
            return True
    return False
