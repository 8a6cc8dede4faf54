"""Run the attention of somebody else's CaiT through faster modules, on its own parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.surgery.batches import as_batches, difference, example_images, run
from fathoms.surgery.faster import FusedTalkingHeads, OneQueryAttention
from fathoms.surgery.replace import replace_module
from fathoms.surgery.report import aligned

# The order of summation changes; what is left is rounding, over the largest value of the output.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_TALKING = ("qkv", "proj", "proj_l", "proj_w", "attn_drop", "proj_drop")
_CLASS = ("q", "k", "v", "proj", "attn_drop", "proj_drop")


@dataclass(frozen=True)
class AccelerateReport:
    """What `accelerate` did.

    Args:
        rows: Path, old class and new class of each module that was replaced.
        left: Path and reason of each that could have been.
        difference: Largest difference of the output over its largest value.
    """

    rows: tuple[tuple[str, str, str], ...]
    left: tuple[tuple[str, str], ...]
    difference: float

    def __len__(self) -> int:
        return len(self.rows)

    def table(self) -> str:
        """One line for each module, and how far the output moved."""
        rows = [*self.rows, *[(name, "left", reason) for name, reason in self.left]]
        moved = f"output differs by {self.difference:.2g} of its largest value"
        return f"{aligned(('module', 'old', 'new'), rows)}\n{moved}"

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def accelerate(model: nn.Module, *, images: Tensor | None = None) -> AccelerateReport:
    """Replace timm's and DeiT's talking-heads and class attention by faster ones, in the model itself.

    Parameters, their names, the state_dict and, but for rounding, the output stay the same, in training and in
    inference. Talking heads run in one fused kernel on a CUDA device; class attention needs no keys and values.

    Args:
        model: Any module.
        images: A batch for the comparison of the output; None makes random ones of the model's size.
    """
    found: list[tuple[str, nn.Module, type[nn.Module]]] = []
    left: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        new = _faster(module)
        if new is FusedTalkingHeads and _rate(module) > 0.0:
            left.append(
                (name, f"it drops attention with probability {_rate(module):g}, which no kernel does")
            )
        elif new is not None:
            found.append((name, module, new))
    if not found:
        why = (
            f"{left[0][0]}: {left[0][1]}"
            if left
            else "no talking-heads or class attention of timm's or DeiT's form"
        )
        raise FathomsError(f"accelerate: {type(model).__name__} has nothing to replace; {why}")
    images = example_images(model, 2) if images is None else as_batches(images, model)[0]
    before = run(model, images)
    pairs = []
    for _, module, new in found:
        faster = new(module)
        replace_module(model, module, faster)
        pairs.append((module, faster))
    gap = difference(before, run(model, images))
    allowed = TOLERANCE.get(images.dtype, 1e-4)
    if not gap <= allowed:
        for module, faster in pairs:
            replace_module(model, faster, module)
        raise FathomsError(
            f"accelerate: the output moved by {gap:.2g} of its largest value, more than {allowed:g}; "
            "the model is as it was, please report it"
        )
    rows = tuple((name, type(old).__name__, new.__name__) for name, old, new in found)
    return AccelerateReport(rows, tuple(left), gap)


def _rate(module: nn.Module) -> float:
    return float(getattr(module.attn_drop, "p", 0.0))  # pyrefly: ignore


def _faster(module: nn.Module) -> type[nn.Module] | None:
    """The class that replaces a module, told by the names of its parts; None for anything else."""
    if isinstance(module, FusedTalkingHeads | OneQueryAttention) or not hasattr(module, "num_heads"):
        return None
    children = dict(module.named_children())
    if set(children) == set(_TALKING):
        return FusedTalkingHeads
    name = type(module).__name__.lower().replace("_", "")
    if set(children) == set(_CLASS) and name.startswith("classatt"):
        return OneQueryAttention
    return None
