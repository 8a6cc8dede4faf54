"""Run the attentions and joins of somebody else's model through faster modules, on its own parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.parts.linear import has_hooks, is_bare
from fathoms.surgery.accelerate.modules import (
    FusedTalkingHeads,
    InPlaceOf,
    OnePassBlock,
    OneQueryAttention,
    scale_of,
)
from fathoms.surgery.inputs import as_batches, difference, example_images, run
from fathoms.surgery.replace import replace_module
from fathoms.text_table import aligned

# The order of summation changes; what is left is rounding, over the largest value of the output.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# The parts of each kind of module, as timm and DeiT call them.
_TALKING = {"qkv", "proj", "proj_l", "proj_w", "attn_drop", "proj_drop"}
_CLASS = {"q", "k", "v", "proj", "attn_drop", "proj_drop"}
_BLOCK = {"norm1", "attn", "norm2", "mlp"}
_JOINS = {"ls1", "ls2", "drop_path", "drop_path1", "drop_path2"}
_SCALES = {"gamma", "gamma_1", "gamma_2"}
# The linears whose weights a new module reads, and the parts that it passes over; it calls all others.
_READ: dict[type[nn.Module], set[str]] = {
    FusedTalkingHeads: {"proj_l", "proj_w"},
    OneQueryAttention: {"k", "v"},
    OnePassBlock: set(),
}
_PASSED: dict[type[nn.Module], set[str]] = {
    FusedTalkingHeads: {"attn_drop"},
    OneQueryAttention: {"attn_drop"},
    OnePassBlock: {"ls1", "ls2"},
}
_NOTHING = nn.Identity()
# Blocks x + gamma * F(norm x); others of the same parts place their norms or tokens otherwise.
_BLOCKS = {"Block", "LayerScaleBlock", "EvaBlock", "LayerScale_Block", "Layer_scale_init_Block"}


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
    """Replace timm's and DeiT's talking heads, class attention and LayerScale by faster ones, in the model itself.

    Parameters, their names, the state_dict and, but for rounding, the output stay the same, in training and in
    inference. Talking heads run in one fused kernel on a CUDA device; class attention needs no keys and values;
    a branch is scaled and added to the stream in one pass.

    Args:
        model: Any module.
        images: A batch for the comparison of the output; None makes random ones of the model's size.
    """
    found: list[tuple[str, nn.Module, type[nn.Module]]] = []
    left: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        new = _faster(module)
        # The model itself stands nowhere that something else could be put.
        if new is None or module is model:
            continue
        if reason := _why_left(module, new):
            left.append((name, reason))
        else:
            found.append((name, module, new))
    if not found:
        why = (
            f"{left[0][0]}: {left[0][1]}"
            if left
            else "no talking heads, class attention or LayerScale of timm's or DeiT's form"
        )
        raise FathomsError(f"accelerate: {type(model).__name__} has nothing to replace; {why}")
    images = example_images(model, 2) if images is None else as_batches(images, model)[0]
    gap = _install(model, [(module, new(module)) for _, module, new in found], images)
    rows = tuple((name, type(old).__name__, new.__name__) for name, old, new in found)
    return AccelerateReport(rows, tuple(left), gap)


def _install(model: nn.Module, pairs: list[tuple[nn.Module, nn.Module]], images: Tensor) -> float:
    """Put the second of each pair in the first one's place; taken back if that moves the output."""
    before = _answers(model, images)
    try:
        for old, new in pairs:
            replace_module(model, old, new)
        gap = max(map(difference, before, _answers(model, images)))
        allowed = TOLERANCE.get(images.dtype, 1e-4)
        if not gap <= allowed:
            raise FathomsError(
                f"accelerate: the output moved by {gap:.2g} of its largest value, more than {allowed:g}; "
                "the model is as it was, please report it"
            )
    except BaseException:
        for old, new in pairs:
            replace_module(model, new, old)
        raise
    return gap


@torch.no_grad()
def _answers(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What a model answers as it is, and with every LayerScale at one.

    Scales that have barely left their start hide what the branches do, and so also a wrong replacement.
    """
    own = run(model, images)
    scales = [p for name, p in model.named_parameters() if name.rpartition(".")[2] in _SCALES]
    kept = [gamma.clone() for gamma in scales]
    try:
        for gamma in scales:
            gamma.fill_(1.0)
        return own, run(model, images)
    finally:
        for gamma, value in zip(scales, kept, strict=True):
            gamma.copy_(value)


def _why_left(module: nn.Module, new: type[nn.Module]) -> str | None:
    """The reason why a module must stay as it is, or None; what is not called any more must not matter to anybody."""
    parts = dict(module.named_children())
    if "forward" in module.__dict__:
        return "something has given it a forward of its own"
    if module._compiled_call_impl is not None:
        return "it is compiled already; accelerate first"
    if module._load_state_dict_pre_hooks:
        return "it has hooks of load_state_dict, which know it alone"
    for part in sorted(_READ[new] & parts.keys()):
        if not is_bare(parts[part]):
            return f"{part} is more than a plain linear or has hooks"
    for part in sorted(_PASSED[new] & parts.keys()):
        if has_hooks(parts[part]):
            return f"{part} has hooks, which would not be called"
    drop = parts.get("attn_drop", _NOTHING)
    if type(drop) not in (nn.Dropout, nn.Identity):
        return f"its attn_drop is of type {type(drop).__name__}, which only its own forward calls"
    if new is FusedTalkingHeads and isinstance(drop, nn.Dropout) and drop.p > 0.0:
        return f"it drops attention with probability {drop.p:g}, which no kernel does"
    return None


def _faster(module: nn.Module) -> type[nn.Module] | None:
    """The class that replaces a module, told by its name and those of its parts; None for anything else."""
    if isinstance(module, InPlaceOf):
        return None
    children = set(dict(module.named_children()))
    if hasattr(module, "num_heads") and children == _TALKING:
        return FusedTalkingHeads
    name = type(module).__name__.lower().replace("_", "")
    if hasattr(module, "num_heads") and children == _CLASS and name.startswith("classatt"):
        return OneQueryAttention
    return OnePassBlock if _is_block(module) else None


def _is_block(module: nn.Module) -> bool:
    """Whether a module is a pre-norm block whose branches are scaled by learned numbers."""
    children = set(dict(module.named_children()))
    form = _BLOCK <= children <= _BLOCK | _JOINS
    return (
        type(module).__name__ in _BLOCKS
        and form
        and any(scale_of(module, place) is not None for place in (1, 2))
    )
