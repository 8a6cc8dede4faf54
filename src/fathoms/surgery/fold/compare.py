"""Compare a folded model with the original, at several batch sizes, and name the cause of a difference."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.surgery.inputs import difference, finite_run, run

# Largest allowed difference between the outputs, over the largest output: rounding only.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# Numbers of images besides those given: a forward that branches on it reads a folded scale elsewhere.
COUNTS = (1, 5)

# A fold that is right in float64 differs by less; a wrong one by far more.
_EXACT = 1e-9

# What the code of another library raises on a number of images, or a dtype, that it does not take.
_REFUSALS = (ArithmeticError, AssertionError, FathomsError, LookupError, RuntimeError, TypeError, ValueError)

Fold = Callable[[nn.Module, Tensor], nn.Module]


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference that is rounding."""
    return _TOLERANCE.get(dtype, 1e-5)


def verified(model: nn.Module, folded: nn.Module, images: Tensor, fold: Fold) -> float:
    """The largest difference of the outputs; an error if it is more than rounding.

    Args:
        model: The original.
        folded: The same, folded.
        images: A batch that it accepts.
        fold: Folds a model; where the outputs differ, the original is folded again in float64 to find out why.
    """
    allowed = tolerance(images.dtype)
    gaps = _gaps(model, folded, images)
    count, gap = max(gaps.items(), key=lambda item: item[1])
    if gap <= allowed:
        return gap
    exact = _gap_in_float64(model, images, fold)
    if exact is not None and exact < _EXACT:
        raise FathomsError(
            f"fold: the folded model differs by {gap:.2g} of its largest output in {_name(images.dtype)} and by "
            f"{exact:.2g} in float64: rounding of this model, not the fold; pass verify=False to take it"
        )
    if gaps[len(images)] <= allowed:
        raise FathomsError(
            f"fold: on a batch of {count} the folded model differs by {gap:.2g} of its largest output, though not on "
            f"one of {len(images)}: its forward depends on the batch size, which a trace does not show; use it unfolded"
        )
    raise FathomsError(
        f"fold: the folded model differs by {gap:.2g} of its largest output, more than {allowed:g}; "
        "please report this model, or look at it with verify=False"
    )


def _gaps(model: nn.Module, folded: nn.Module, images: Tensor) -> dict[int, float]:
    """The difference of the outputs on these images, and on each further number of them that the original takes."""
    gaps = {len(images): difference(finite_run(model, images, "fold"), run(folded, images))}
    for count in (count for count in COUNTS if count != len(images)):
        batch = images[torch.arange(count, device=images.device) % len(images)]
        try:
            expected = run(model, batch)
        except _REFUSALS:
            continue
        gaps[count] = difference(expected, run(folded, batch))
    return gaps


def _gap_in_float64(model: nn.Module, images: Tensor, fold: Fold) -> float | None:
    """The difference without rounding; None if the model is in float64 already, or does not run in it."""
    if images.dtype == torch.float64:
        return None
    try:
        wide = copy.deepcopy(model).double()
        exact = images.double() if images.is_floating_point() else images
        return max(_gaps(wide, fold(wide, exact), exact).values())
    except _REFUSALS:
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
