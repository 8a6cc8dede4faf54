"""Fold a model's learned scales and shifts into the matrices next to them: same answers, fewer operations."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.parts.dyt import Derf, DyT
from fathoms.surgery.fold.affine_parts import AffinePart, find_parts
from fathoms.surgery.fold.arithmetic import Weights, absorb, check, note_bias, take_out
from fathoms.surgery.fold.bare import BareDerf, BareDyT
from fathoms.surgery.fold.cleanup import (
    NEUTRAL,
    REMOVED,
    clear,
    drop_ones,
    follow_config,
    is_neutral,
    neutralise,
)
from fathoms.surgery.fold.graph import Traced, trace
from fathoms.surgery.fold.normal_form import join_biases, learn_constants, plain_scales, remove_drop_path
from fathoms.surgery.fold.targets import NoRouteError, routes
from fathoms.surgery.inputs import as_batches, difference, example_images, run
from fathoms.text_table import aligned

# How far a folded model's answer may be from the original's, over its largest value: rounding only.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


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
class FoldReport:
    """What `fold` did.

    Args:
        rows: What was folded, in the order in which it acts.
        left: Parameters of parts that stay, each with the reason.
        parameters: How many numbers the model holds, before and after.
        drop_paths: Stochastic-depth modules that were taken out.
        difference: Largest difference of the output over its largest value; None if it was not checked.
    """

    rows: tuple[FoldRow, ...]
    left: tuple[tuple[str, str], ...]
    parameters: tuple[int, int]
    drop_paths: int
    difference: float | None

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[FoldRow]:
        return iter(self.rows)

    @property
    def operations(self) -> int:
        """Elementwise operations saved in one forward pass."""
        return sum(row.operations for row in self.rows)

    def table(self) -> str:
        """One line for each part, folded or left, and what was saved."""
        rows = [(row.name, ", ".join(row.into), row.became) for row in self.rows]
        rows += [(name, "left", reason) for name, reason in self.left]
        saved = f"{self.operations} operations and {self.parameters[0] - self.parameters[1]} parameters saved"
        lines = [f"{len(self.rows)} parts folded, {len(self.left)} left, {saved}"]
        if not self.rows:
            lines.append("nothing was left to fold")
        if self.difference is not None:
            lines.append(f"output differs by {self.difference:.2g} of its largest value")
        return "\n".join([aligned(("part", "into", "became"), rows), *lines])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "operations": self.operations}


def fold(
    model: nn.Module, *, images: Tensor | None = None, verify: bool = True
) -> tuple[nn.Module, FoldReport]:
    """A copy of a model, in inference mode, with its scales and shifts folded away, and what was folded.

    LayerScale, ReZero and SkipInit go into the linear before them; LearnableScaler and the tail of LayerNorm,
    RMSNorm, DyT and Derf into the linears after them. Which those are is read off a run of the model, so any
    model will do; a part whose neighbours are shared, or that also feeds the residual stream, is left and
    the report says why. What leaves a final norm is no longer scaled: the classifier does that now.

    Args:
        model: Any module; it is not changed.
        images: A batch it takes; None makes random ones of its size.
        verify: Compare the answers of both, and raise if they differ by more than rounding.

    >>> from fathoms import create_model
    >>> vit = create_model("vit_digits", depth=2, num_classes=10, norm="learnable_scaler")
    >>> folded, report = fold(vit)
    >>> folded.config.norm, len(report), report.left
    ('none', 5, ())
    """
    images = example_images(model, 2) if images is None else as_batches(images, model)[0]
    folded = copy.deepcopy(model).eval()
    before = sum(p.numel() for p in model.parameters())
    drop_paths = remove_drop_path(folded)
    join_biases(folded)
    learn_constants(folded)
    rows, left = _fold_all(folded, trace(folded, images), images)
    plain_scales(folded)
    if not rows and not left and not getattr(model, "folded_by_fathoms", False):
        raise FathomsError(f"fold: {type(model).__name__} has no learned scale to fold; export it as it is")
    gap = _verified(model, folded, images) if verify else None
    follow_config(folded, images)
    folded.folded_by_fathoms = True  # pyrefly: ignore
    after = sum(p.numel() for p in folded.parameters())
    return folded, FoldReport(tuple(rows), tuple(left), (before, after), drop_paths, gap)


def _fold_all(
    model: nn.Module, traced: Traced, images: Tensor
) -> tuple[list[FoldRow], list[tuple[str, str]]]:
    """Fold part after part; one that could not be folded is tried again once another has gone."""
    weights = Weights(model)
    done: list[tuple[AffinePart, tuple[str, ...], bool]] = []
    reasons: dict[tuple[str, ...], str] = {}
    moved = True
    while moved:
        moved, reasons = False, {}
        while (found := _next(traced, weights, reasons)) is not None:
            done.append(found)
            moved = True
    scales = {part.parameters for part in find_parts(traced) if part.weight is not None}
    left = [(_names(key), why) for key, why in reasons.items() if key in scales and not _curve(key, weights)]
    became = {part.parameters: clear(model, part, weights) for part, _, _ in done}
    kept = [name for names, state in became.items() if state == NEUTRAL for name in names]
    dropped = drop_ones(model, kept, images)
    rows = []
    for part, into, nothing_new in done:
        state = REMOVED if dropped.issuperset(part.parameters) else became[part.parameters]
        if state != NEUTRAL or not nothing_new:
            rows.append(_row(part, into, state))
    return rows, left


def _next(
    traced: Traced, weights: Weights, reasons: dict[tuple[str, ...], str]
) -> tuple[AffinePart, tuple[str, ...], bool] | None:
    """Fold the first part that can be and has not been refused since the last change."""
    for part in find_parts(traced):
        if part.parameters in reasons or _curve(part.parameters, weights):
            continue
        try:
            targets = routes(part, traced)
            for target in targets:
                check(part, target, weights)
        except NoRouteError as reason:
            reasons[part.parameters] = str(reason)
            continue
        nothing_new = is_neutral(part, weights)
        for target in targets:
            made = absorb(part, target, weights)
            if made is not None:
                note_bias(target, made, traced)
        neutralise(part, weights)
        take_out(part, traced)
        return part, tuple(target.weight or target.bias or "" for target in targets), nothing_new
    return None


def _curve(names: tuple[str, ...], weights: Weights) -> bool:
    """Whether these are the slope and shift inside a DyT's or Derf's curve, which are no scale to fold."""
    curves = (DyT, Derf, BareDyT, BareDerf)
    return any(
        name.endswith((".alpha", ".shift")) and isinstance(weights.owner(name)[0], curves) for name in names
    )


def _names(parameters: tuple[str, ...]) -> str:
    """Parameters of one module in short: "norm.weight, bias"."""
    first, *rest = parameters
    path = first.rpartition(".")[0]
    return ", ".join([first, *[name.removeprefix(f"{path}.") for name in rest]])


def _row(part: AffinePart, into: tuple[str, ...], became: str) -> FoldRow:
    nodes = sum(2 if use.first is not use.last else 1 for use in part.uses if use.entry is not None)
    return FoldRow(_names(part.parameters), into, became, 0 if became == NEUTRAL else nodes)


def _verified(model: nn.Module, folded: nn.Module, images: Tensor) -> float:
    """How far the answers are apart; an error if it is more than rounding."""
    gap = difference(run(model, images), run(folded, images))
    allowed = TOLERANCE.get(images.dtype, 1e-5)
    if not gap <= allowed:
        raise FathomsError(
            f"fold: the folded model differs by {gap:.2g} of its largest output, more than {allowed:g}; "
            "please report this model, or look at it with verify=False"
        )
    return gap
