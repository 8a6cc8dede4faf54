"""Fold a model's learned scales and shifts into the matrices next to them: same outputs, fewer operations."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor, fx, nn

from fathoms.errors import FathomsError
from fathoms.surgery.fold.affine_parts import AffinePart, find_parts
from fathoms.surgery.fold.arithmetic import Weights, absorb_permanently, is_neutral
from fathoms.surgery.fold.cleanup import Fate, clean
from fathoms.surgery.fold.compare import tolerance, verified
from fathoms.surgery.fold.graph import Traced, trace
from fathoms.surgery.fold.normal_form import prepare
from fathoms.surgery.fold.targets import NoRouteError, by_output, route
from fathoms.surgery.inputs import as_batches, check_comparable, check_model, example_images
from fathoms.surgery.report import FoldReport, FoldRow
from fathoms.surgery.zeros import depends_on_images, proof_notes, zero_parameters, zeros_at_random

# A part that was folded, the weights that absorbed it, and whether it was all ones and zeros before.
_Folded = tuple[AffinePart, tuple[str, ...], bool]


def fold(
    model: nn.Module, *, images: Tensor | None = None, verify: bool = True
) -> tuple[nn.Module, FoldReport]:
    """A copy of a model in inference mode with its scales and shifts folded away, and a report.

    LayerScale, ReZero and SkipInit go into the linear before them; LearnableScaler and the tail of LayerNorm,
    RMSNorm, DyT and Derf into the linears after them. Which those are is read off a traced forward pass, so any
    model will do. A part whose neighbours are shared, or that also feeds the residual stream, is left, and the
    report says why. The output of a final norm is no longer scaled: the classifier does that now.

    Args:
        model: Any module; it is not changed.
        images: A batch (B, ...) that it accepts; None draws random images of its size.
        verify: Compare the outputs of both, on these images and on batches of 1 and 5, and raise if they differ by
            more than rounding; parameters that are all zero, which hide what they multiply, are compared at random
            values too.

    >>> from fathoms import create_model
    >>> vit = create_model("vit_digits", depth=2, num_classes=10, norm="learnable_scaler")
    >>> folded, report = fold(vit)
    >>> folded.config.norm, len(report), report.left
    ('none', 5, ())
    """
    check_model(model, "fold")
    images = example_images(model, 2) if images is None else as_batches(images, model)[0]
    if verify:
        check_comparable(model, images, "fold", tolerance(images.dtype), "pass verify=False")
    folded, report = _folded(model, images)
    if not verify:
        return folded, report
    gap, zeros = verified(model, folded, images, _fold_only), zero_parameters(model)
    if zeros:
        # With zeros at random the folding is another one, of the same parts: that one is compared too.
        awake = copy.deepcopy(model)
        with zeros_at_random(zeros, awake):
            gap = max(gap, verified(awake, _fold_only(awake, images), images, _fold_only))
            proved = depends_on_images(awake, images)
    else:
        proved = depends_on_images(model, images)
    return folded, replace(report, difference=gap, notes=proof_notes(zeros, proved))


def _fold_only(model: nn.Module, images: Tensor) -> nn.Module:
    return _folded(model, images)[0]


def _folded(model: nn.Module, images: Tensor) -> tuple[nn.Module, FoldReport]:
    """A folded copy of a model, and the report without the comparison."""
    folded = copy.deepcopy(model).eval()
    drop_paths = prepare(folded)
    traced, weights = trace(folded, images), Weights(folded)
    done, left = _fold_parts(traced, weights)
    fates = clean(folded, [part for part, _, _ in done], weights, images)
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
    return folded, FoldReport(tuple(rows), tuple(left), (before, after), drop_paths, None)


def _fold_parts(traced: Traced, weights: Weights) -> tuple[list[_Folded], list[tuple[str, str]]]:
    """Fold all parts that can be folded; a refused part is tried again once others have gone."""
    done: list[_Folded] = []
    while True:
        folded, refused = _one_round(traced, weights)
        done += folded
        if not folded:
            left = [(_names(part), why) for part, why in refused.items() if part.weight is not None]
            return done, left


def _one_round(traced: Traced, weights: Weights) -> tuple[list[_Folded], dict[AffinePart, str]]:
    """Try every part once, in the order in which they act; those folded, and the reasons for the others."""
    done: list[_Folded] = []
    refused: dict[AffinePart, str] = {}
    stale = True
    while stale:
        stale = False
        tried = {part.parameters for part in refused}
        parts = find_parts(traced)
        others, nodes = by_output(parts), {node for part in parts for node in part.nodes}
        for part in parts:
            if part.parameters in tried:
                continue
            neutral, neighbours = is_neutral(part, weights), _neighbours(part, traced)
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


def _neighbours(part: AffinePart, traced: Traced) -> set[fx.Node]:
    """The nodes that meet once a part is taken out of the graph; none for the tail of a norm."""
    inner = [(use.entry, use.last) for use in part.uses if use.entry is not None]
    return {node for entry, last in inner for node in (entry, *traced.users(last))}


def _names(part: AffinePart) -> str:
    """Parameters of one part in short: "norm.weight, bias"."""
    first, *rest = part.parameters
    path = first.rpartition(".")[0]
    return ", ".join([first, *[name.removeprefix(f"{path}.") for name in rest]])


def _row(part: AffinePart, into: tuple[str, ...], became: Fate) -> FoldRow:
    nodes = sum(2 if use.first is not use.last else 1 for use in part.uses if use.entry is not None)
    return FoldRow(_names(part), into, became, 0 if became == "set to one" else nodes)
