"""Swap the norms of a model: keep, reset or calibrate their learned scales and shifts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.models.vit import ViT
from fathoms.names.registry import check_name
from fathoms.parts.norms.norm import NORMS
from fathoms.parts.norms.scaler import LearnableScaler2d
from fathoms.surgery.inputs import as_batches, check_comparable, check_model, difference, example_images, run
from fathoms.surgery.replace import replace_module
from fathoms.surgery.report import SwapReport, SwapRow
from fathoms.surgery.swap.calibrate import fit, record_pairs, running_order
from fathoms.surgery.swap.functional import functional_norms
from fathoms.surgery.swap.new_norm import NewNorm, build_part, carry
from fathoms.surgery.swap.sites import Choice, NormSite, choose_sites, find_sites
from fathoms.surgery.zeros import depends_on_images, proof_notes, zero_parameters, zeros_at_random

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
) -> SwapReport:
    """Replace a model's norms by the norm `to`, in place.

    "keep" copies each norm's learned scale and shift into the new one; a LearnableScaler also takes in a
    BatchNorm's running statistics, which makes that swap exact. "reset" starts the new norms afresh.
    "calibrate" fits each new norm to the old norm's outputs on the batches. In place of a frozen norm, the new one
    is frozen too.

    Args:
        model: Any module, of fathoms or not.
        to: Name of a norm: see `fathoms parts norm`.
        only: Shell patterns over the names of modules, a range of block indices, or a function of a
            `NormSite`; None takes every norm that is not a `to` already.
        calibrate: A batch of images, or an iterable of batches. With how="keep" or "reset" they only
            measure how much the output changes.
        how: "keep", "reset" or "calibrate"; None calibrates if there are batches, and keeps otherwise.

    >>> from fathoms import create_model
    >>> vit = create_model("vit_digits", depth=2, num_classes=10)
    >>> len(swap_norms(vit, "learnable_scaler", only="blocks.*"))
    4
    """
    check_model(model, "swap_norms")
    NORMS.check(to, "swap_norms")
    batches = None if calibrate is None else as_batches(calibrate, model)
    how = check_name(how or ("keep" if batches is None else "calibrate"), WAYS, "way", "swap_norms: how")
    if how == "calibrate" and batches is None:
        raise FathomsError("swap_norms: how='calibrate' needs batches; pass calibrate=")
    sites = _sites(model, to, only, batches)
    if batches is not None:
        check_comparable(model, batches[0], "swap_norms", REPEATS, "leave calibrate= out")
    if how != "reset":
        _refuse_training_batchnorm(sites)
    new = {site.name: build_part(site, to, model) for site in sites}
    if how == "keep":
        new = {site.name: carry(site, new[site.name]) for site in sites}
    for site in sites:
        new[site.name].module.train(site.module.training)
    errors: dict[str, float] = {}
    change, proof = None, ()
    if batches is None:
        for site in sites:
            replace_module(model, site.module, new[site.name].module)
    else:
        teacher = copy.deepcopy(model)
        errors = _install_in_order(model, teacher, sites, new, batches, how == "calibrate")
        change, proof = _compared(teacher, model, batches)
    notes = (*_after(model, to, batches), *proof)
    rows = tuple(_row(site, to, new[site.name], errors.get(site.name)) for site in sites)
    return SwapReport(how, rows, change, notes)


def _compared(teacher: nn.Module, model: nn.Module, batches: list[Tensor]) -> tuple[float, tuple[str, ...]]:
    """The change of the output on the batches, and what it did not prove."""

    def change() -> float:
        return max(difference(run(teacher, batch), run(model, batch)) for batch in batches)

    ours = zero_parameters(model)
    zeros = [name for name in zero_parameters(teacher) if name in ours]
    largest = change()
    with zeros_at_random(zeros, teacher, model):
        largest = max(largest, change()) if zeros else largest
        return largest, proof_notes(zeros, depends_on_images(teacher, batches[0]))


def _sites(model: nn.Module, to: str, only: Choice | None, batches: list[Tensor] | None) -> list[NormSite]:
    """The norms to be swapped; an error with the reason if there are none."""
    found = find_sites(model)
    sites = [site for site in found if site.kind != to]
    if sites:
        return choose_sites(sites, only)
    name = type(model).__name__
    if found:
        raise FathomsError(f"swap_norms: every norm of {name} is a {to} already; there is nothing to swap")
    if getattr(model, "folded_by_fathoms", False):
        raise FathomsError(f"swap_norms: {name} was folded and has no norm left; swap before folding")
    calls = _functions(model, batches)
    if calls:
        place, function = next(iter(calls.items()))
        raise FathomsError(
            f"swap_norms: {place or name} calls {function} as a function, which cannot be swapped; "
            "make it a module such as nn.LayerNorm"
        )
    raise FathomsError(f"swap_norms: {name} has no norm among its modules; there is nothing to swap")


def _functions(model: nn.Module, batches: list[Tensor] | None) -> dict[str, str]:
    try:
        return functional_norms(model, batches[0] if batches else example_images(model, 1))
    except (FathomsError, RuntimeError, TypeError, ValueError):
        # This only improves an error message; a model that cannot be run here gets the plain one.
        return {}


def _refuse_training_batchnorm(sites: list[NormSite]) -> None:
    for site in sites:
        if site.kind == "batchnorm" and site.module.training:
            raise FathomsError(
                f"{site.name}: a BatchNorm in training mode depends on the batch and is not a fixed map; "
                "call model.eval() first, or use how='reset'"
            )


def _install_in_order(
    model: nn.Module,
    teacher: nn.Module,
    sites: list[NormSite],
    new: dict[str, NewNorm],
    batches: list[Tensor],
    fitted: bool,
) -> dict[str, float]:
    """Swap the sites in the order in which they run, fitted if `fitted`; the error of each on the batches.

    A failure leaves the model unchanged.
    """
    originals = dict(teacher.named_modules())
    by_name = {site.name: site for site in sites}
    errors: dict[str, float] = {}
    try:
        for name in running_order(model, {site.name: site.module for site in sites}, batches[0]):
            site, part = by_name[name], new[name]
            modules = (originals[name], site.module)
            pairs = record_pairs(teacher, model, modules, batches, site.layout)
            errors[name] = fit(part.part, pairs) if fitted else _error_of(part, pairs)
            replace_module(model, site.module, part.module)
    except BaseException:
        for site in sites:
            replace_module(model, new[site.name].module, site.module)
        raise
    return errors


@torch.no_grad()
def _error_of(new: NewNorm, pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Relative error of the new norm, as it is, against the old norm's outputs."""
    part = copy.deepcopy(new.part).double()
    missed = sum(float((y - _on_rows(part, x)).square().sum()) for x, y in pairs)
    whole = sum(float(y.square().sum()) for _, y in pairs)
    return (missed / max(whole, 1e-30)) ** 0.5


def _on_rows(part: nn.Module, x: Tensor) -> Tensor:
    """A norm applied to tokens (rows, channels), also one for maps."""
    if isinstance(part, LearnableScaler2d):
        return part(x[:, :, None, None])[:, :, 0, 0]
    return part(x)


def _row(site: NormSite, to: str, new: NewNorm, error: float | None) -> SwapRow:
    counts = [sum(p.numel() for p in module.parameters()) for module in (site.module, new.part)]
    return SwapRow(site.name, type(site.module).__name__, to, (counts[0], counts[1]), error, new.note)


def _after(model: nn.Module, to: str, batches: list[Tensor] | None) -> tuple[str, ...]:
    """Update a fathoms model's config; the notes name what a swap of modules did not reach."""
    notes = []
    if isinstance(model, ViT) and not _follow(model, to):
        notes.append("config: no ViTConfig describes this mixture; model.config still names the old norms")
    if batches is not None:
        for place, function in functional_norms(model, batches[0]).items():
            notes.append(f"{place or 'the model'} calls {function} as a function: not swapped")
    return tuple(notes)


def _follow(model: ViT, to: str) -> bool:
    """Adopt the config that describes the swapped model, if there is one."""
    own = {name: parameter.shape for name, parameter in model.named_parameters()}
    change = {"norm": to, "norm_init": None, "norm_by_depth": None, "final_norm": None}
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
