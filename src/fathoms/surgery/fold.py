"""Fold a model's learned scales and shifts into the matrices next to them: same outputs, fewer operations."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fathoms.errors import FathomsError
from fathoms.surgery.fold_absorb import (
    NoRouteError,
    Weights,
    absorb_permanently,
    is_neutral,
    route,
)
from fathoms.surgery.fold_graph import AffinePart, Traced, computed_scales, find_parts, operation, trace
from fathoms.surgery.fold_modules import Fate, clean, prepare
from fathoms.surgery.inputs import (
    REFUSALS,
    Inputs,
    as_inputs,
    check_model,
    difference,
    dtype_of,
    exactly,
    example_inputs,
    resized,
    run,
    shapes_of,
    size_of,
    with_size,
)
from fathoms.surgery.trial import Report, check_comparable, proof_notes, zero_parameters, zeros_at_random
from fathoms.text_table import aligned

# Largest allowed difference between the outputs, over the largest output: rounding only.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# Numbers of images besides those given: a forward that branches on it reads a folded scale elsewhere.
_COUNTS = (1, 5)

# A fold that is right in float64 differs by less; a wrong one by far more.
_EXACT = 1e-9

# A part that was folded, the weights that absorbed it, and whether it was all ones and zeros before.
_Folded = tuple[AffinePart, tuple[str, ...], bool]


@dataclass(frozen=True)
class FoldRow:
    """One scale or shift that was folded.

    Args:
        name: Its parameters.
        into: The weights that took it in.
        became: "removed", "statistics only", or "set to one" where the model's own code multiplies by it.
        operations: Elementwise operations that no longer run, in one forward pass.
    """

    name: str
    into: tuple[str, ...]
    became: str
    operations: int


@dataclass(frozen=True)
class FoldReport(Report):
    """The result of `fold`.

    Args:
        rows: The parts that were folded, in the order of folding.
        left: Parameters of parts that stay, each with the reason.
        parameters: Number of the model's parameters, before and after.
        operations: Elementwise operations saved in one forward pass.
        drop_paths: Number of stochastic-depth modules that were removed.
        difference: Largest difference of the output over its largest value; None if it was not checked.
        sizes: Shapes of inputs of other sizes at which the outputs agree too.
        notes: Sizes at which they do not, what the comparison did not prove, and what would fold more.
    """

    rows: tuple[FoldRow, ...]
    left: tuple[tuple[str, str], ...]
    parameters: tuple[int, int]
    operations: int
    drop_paths: int
    difference: float | None = None
    sizes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """One line for each part, folded or left, then the savings and the difference."""
        rows = [(row.name, ", ".join(row.into), row.became) for row in self.rows]
        rows += [(name, "left", reason) for name, reason in self.left]
        fewer = self.parameters[0] - self.parameters[1]
        added = f" saved, {-fewer} parameters added: biases where there were none"
        saved = f"{self.operations} operations" + (added if fewer < 0 else f" and {fewer} parameters saved")
        lines = [f"{len(self.rows)} parts folded, {len(self.left)} left, {saved}"]
        if not self.rows:
            lines.append("nothing was left to fold")
        if self.difference is not None:
            lines.append(f"output differs by {self.difference:.2g} of its largest value")
        if self.sizes:
            lines.append(f"and agrees at inputs of {', '.join(self.sizes)}")
        return "\n".join([aligned(("part", "into", "became"), rows), *lines, *self.notes])


def fold(model: nn.Module, *, images: Any = None, verify: bool = True) -> tuple[nn.Module, FoldReport]:
    """A copy of a model in inference mode with its scales and shifts folded away, and a report.

    LayerScale, ReZero and SkipInit go into the linear before them; LearnableScaler and the tail of LayerNorm,
    RMSNorm, DyT and Derf into the linears after them. Which those are is read off a traced forward pass, so any
    model will do. A part whose neighbours are shared, or that also feeds the residual stream, is left, and the
    report says why. The output of a final norm is no longer scaled: the classifier does that now.

    Args:
        model: Any module; it is not changed.
        images: A batch that it accepts: a tensor, a tuple of the arguments of its forward, or a dict of them. None
            draws random images of its size, or token ids.
        verify: Compare the outputs of both, on these images and on batches of 1 and 5, and raise if they differ by
            more than rounding; then at other sizes of the images, and say at which they differ. Parameters that
            are all zero, which hide what they multiply, are compared at random values too.

    >>> from fathoms import create_model
    >>> vit = create_model("vit_digits", depth=2, num_classes=10, norm="learnable_scaler")
    >>> folded, report = fold(vit)
    >>> folded.config.norm, len(report), report.left
    ('none', 5, ())
    """
    check_model(model, "fold")
    inputs = example_inputs(model, 2) if images is None else as_inputs(images, model)
    if verify:
        check_comparable(model, inputs, "fold", _allowed(inputs, model), "pass verify=False")
    folded, report = _folded(model, inputs)
    if not verify:
        return folded, report
    # With zeros at random the folding is another one, of the same parts: that one is compared too.
    gap, pair = _verified(model, folded, inputs), (model, folded)
    awake = copy.deepcopy(model) if zero_parameters(model) else model
    with zeros_at_random(awake) as zeros:
        if zeros:
            pair = awake, _folded(awake, inputs)[0]
            gap = max(gap, _verified(*pair, inputs))
        sizes, differs = _other_sizes(*pair, inputs)
        notes = (*report.notes, *differs, *proof_notes(zeros, awake, inputs))
    return folded, replace(report, difference=gap, sizes=tuple(sizes), notes=notes)


def _folded(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, FoldReport]:
    """A folded copy of a model, and the report without the comparison."""
    folded = copy.deepcopy(model).eval()
    drop_paths = prepare(folded)
    traced, weights = trace(folded, inputs), Weights(folded)
    done, refused = _one_round(traced, weights)
    # A refused part is tried again once others have gone.
    more = done
    while more:
        more, refused = _one_round(traced, weights)
        done = [*done, *more]
    left = [(_names(part), why) for part, why in refused.items() if part.weight is not None]
    left += [(name, "a number is added to it before it multiplies") for name in computed_scales(traced)]
    fates = clean(folded, [part for part, _, _ in done], weights, inputs)
    # A part of ones and zeros that could not be removed is as it was, and no row of the report.
    rows = [
        _row(part, into, fates[part])
        for part, into, neutral in done
        if not (neutral and fates[part] == "set to one")
    ]
    if not rows and not left and not getattr(model, "folded_by_fathoms", False):
        raise FathomsError(f"fold: {type(model).__name__} has no learned scale to fold; export it as it is")
    folded.folded_by_fathoms = True  # pyrefly: ignore
    before, after = (sum(p.numel() for p in each.parameters()) for each in (model, folded))
    saved = sum(row.operations for row in rows)
    stay = sum(operation(node) == "batch_norm" for node in traced.graph.nodes)
    swap = f'{stay} BatchNorms stay; fathoms.swap_norms(model, "learnable_scaler") makes scalers of them, which fold'
    notes = (swap,) if stay else ()
    return folded, FoldReport(tuple(rows), tuple(left), (before, after), saved, drop_paths, notes=notes)


def _one_round(traced: Traced, weights: Weights) -> tuple[list[_Folded], dict[AffinePart, str]]:
    """Try every part once, in the order in which they act; those folded, and the reasons for the others."""
    done: list[_Folded] = []
    refused: dict[AffinePart, str] = {}
    stale = True
    while stale:
        stale = False
        tried = {part.parameters for part in refused}
        parts = find_parts(traced)
        others = {use.last: (part, use) for part in parts for use in part.uses}
        nodes = {node for part in parts for node in part.nodes}
        for part in parts:
            if part.parameters in tried:
                continue
            neutral = is_neutral(part, weights)
            # The nodes that meet once a part is taken out of the graph; none for the tail of a norm.
            inner = [(use.entry, use.last) for use in part.uses if use.entry is not None]
            neighbours = {node for entry, last in inner for node in (entry, *traced.users(last))}
            try:
                targets = route(part, traced, others)
                absorb_permanently(part, targets, weights, traced)
            except NoRouteError as reason:
                refused[part] = str(reason)
                continue
            done.append((part, tuple(target.weight or target.bias or "" for target in targets), neutral))
            for use in part.uses:
                del others[use.last]
            # Two parts that now touch may be one: they are found anew.
            if stale := not neighbours.isdisjoint(nodes - part.nodes):
                break
    return done, refused


def _names(part: AffinePart) -> str:
    """Parameters of one part in short: "norm.weight, bias"."""
    first, *rest = part.parameters
    path = first.rpartition(".")[0]
    return ", ".join([first, *[name.removeprefix(f"{path}.") for name in rest]])


def _row(part: AffinePart, into: tuple[str, ...], became: Fate) -> FoldRow:
    nodes = sum(2 if use.first is not use.last else 1 for use in part.uses if use.entry is not None)
    return FoldRow(_names(part), into, became, 0 if became == "set to one" else nodes)


def _allowed(inputs: Inputs, model: nn.Module) -> float:
    """The largest difference that is rounding."""
    return _TOLERANCE.get(dtype_of(inputs, model), 1e-5)


def _verified(model: nn.Module, folded: nn.Module, images: Inputs) -> float:
    """The largest difference of the outputs; an error that names its cause if it is more than rounding."""
    allowed, own = _allowed(images, model), size_of(images)
    batches = [images, *(with_size(images, count) for count in _COUNTS if count != own)]
    gaps = {size_of(batch): gap for batch, gap in _gaps(model, folded, batches)}
    count, gap = max(gaps.items(), key=lambda item: item[1])
    if gap <= allowed:
        return gap
    much = f"the folded model differs by {gap:.2g} of its largest output"
    if (exact := _gap_in_float64(model, images, batches)) < _EXACT:
        dtype = str(dtype_of(images, model)).removeprefix("torch.")
        why = f"in {dtype} and by {exact:.2g} in float64: rounding of this model, not the fold"
        raise FathomsError(f"fold: {much} {why}; pass verify=False to take it")
    if gaps[own] <= allowed:
        raise FathomsError(
            f"fold: on a batch of {count} {much}, though not on one of {own}: its forward depends on the batch "
            "size, which a trace does not show; use it unfolded"
        )
    raise FathomsError(
        f"fold: {much}, more than {allowed:g}; please report this model, or look at it with verify=False"
    )


def _gaps(model: nn.Module, folded: nn.Module, batches: Iterable[Inputs]) -> Iterator[tuple[Inputs, float]]:
    """The difference of the outputs on each batch that the original takes; infinite where the folded one fails."""
    for batch in batches:
        try:
            expected = run(model, batch)
        except REFUSALS:
            continue
        try:
            yield batch, difference(expected, run(folded, batch))
        except REFUSALS:
            yield batch, float("inf")


def _other_sizes(model: nn.Module, folded: nn.Module, images: Inputs) -> tuple[list[str], list[str]]:
    """Other sizes of the inputs at which a fold holds, and a note on those at which it does not.

    A forward that pads only where it must hands a folded shift on elsewhere at some sizes, which a trace at one
    of them does not show. Sizes that the original does not take are passed over.
    """
    holds, differs = [], []
    # Swin of transformers keeps the smaller windows that a small image gave it.
    pair = copy.deepcopy(model), copy.deepcopy(folded)
    for batch, gap in _gaps(*pair, resized(with_size(images, 1))):
        if gap <= _allowed(images, model) or _gap_in_float64(model, images, [batch]) < _EXACT:
            holds.append(shapes_of(batch))
        else:
            differs.append(f"{shapes_of(batch)} by {gap:.2g}")
    note = f"differs at inputs of {', '.join(differs)} of the largest output: its forward depends on the size, which a "
    return holds, [f"{note}trace does not show; fold it at each size of use"] if differs else []


def _gap_in_float64(model: nn.Module, images: Inputs, batches: Iterable[Inputs]) -> float:
    """The difference on batches in float64, folded on `images`; infinite where a model is in it or does not run."""
    if dtype_of(images, model) == torch.float64:
        return float("inf")
    try:
        wide = copy.deepcopy(model).double()
        pair = wide, _folded(wide, exactly(images))[0]
        return max((gap for _, gap in _gaps(*pair, map(exactly, batches))), default=float("inf"))
    except REFUSALS:
        return float("inf")
