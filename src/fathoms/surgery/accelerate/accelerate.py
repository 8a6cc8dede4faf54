"""Replace the attentions and MLPs of any model by faster modules, on its own parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.ops.mlp import why_not_here
from fathoms.parts.linear import has_hooks, is_bare, is_exact_gelu
from fathoms.surgery.accelerate.modules import FusedMLP, FusedTalkingHeads, InPlaceOf, OneQueryAttention
from fathoms.surgery.inputs import (
    as_batches,
    check_comparable,
    check_model,
    difference,
    example_images,
    finite_run,
    run,
)
from fathoms.surgery.replace import replace_module
from fathoms.surgery.zeros import depends_on_images, proof_notes, zero_parameters, zeros_at_random
from fathoms.text_table import aligned

# The order of summation changes; what is left is rounding, over the largest value of the output.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# The parts of each kind of module, as timm and DeiT call them.
_TALKING = {"qkv", "proj", "proj_l", "proj_w", "attn_drop", "proj_drop"}
_CLASS = {"q", "k", "v", "proj", "attn_drop", "proj_drop"}
_MLP = {"fc1", "act", "fc2"}
# Besides those an MLP may have these, if they do nothing in inference.
_MLP_EXTRAS = {"drop", "drop1", "drop2", "norm"}
_SCALES = {"gamma", "gamma_1", "gamma_2"}
# The linears whose weights a new module reads, and the parts that it passes over; it calls all others.
_READ: dict[type[nn.Module], set[str]] = {
    FusedTalkingHeads: {"proj_l", "proj_w"},
    OneQueryAttention: {"k", "v"},
    FusedMLP: {"fc1", "fc2"},
}
_PASSED: dict[type[nn.Module], set[str]] = {
    FusedTalkingHeads: {"attn_drop"},
    OneQueryAttention: {"attn_drop"},
    FusedMLP: {"act", *_MLP_EXTRAS},
}
_NOTHING = nn.Identity()

NOTHING = (
    "gains nothing: it has no talking heads or class attention as timm and DeiT write them, and no MLP that a kernel "
    "serves here"
)
LEFT = "gains nothing; it is as it was, for these reasons"


@dataclass(frozen=True)
class AccelerateReport:
    """The result of `accelerate`.

    Args:
        rows: Path, old class and new class of each module that was replaced.
        left: Path of each that was recognised but left, and the reason.
        difference: Largest difference of the output over its largest value.
        notes: What gains nothing, and what the comparison did not prove.
    """

    rows: tuple[tuple[str, str, str], ...]
    left: tuple[tuple[str, str], ...]
    difference: float
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def table(self) -> str:
        """One line for each module, then the difference of the output."""
        rows = [*self.rows, *[(name, "left", reason) for name, reason in self.left]]
        lines = [aligned(("module", "old", "new"), rows)] if rows else []
        if self.rows:
            lines.append(f"output differs by {self.difference:.2g} of its largest value")
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def accelerate(model: nn.Module, *, images: Tensor | None = None) -> AccelerateReport:
    """Replace timm's and DeiT's talking heads, class attention and MLPs by faster modules, in the model itself.

    Parameters, their names, the state_dict and, but for rounding, the output stay the same, in training and in
    inference. Talking heads run in Triton kernels on a CUDA device; class attention needs no keys and values.
    MLPs, those of fathoms too, run in one kernel in inference, where that has been measured to pay: on a GPU of compute
    capability 9, up to 256 channels, from 16,384 tokens on; so move the model to its device first. A model with nothing
    to replace is left as it is, and its report has no rows.

    Args:
        model: Any module.
        images: A batch (B, C, H, W) for the comparison of the output; None makes random ones of the model's size.

    >>> import timm
    >>> cait = timm.create_model("cait_xxs24_224", depth=1)
    >>> report = accelerate(cait)
    >>> len(report), cait(torch.randn(2, 3, 224, 224)).shape
    (3, torch.Size([2, 1000]))
    """
    check_model(model, "accelerate")
    found, left = _candidates(model)
    if not found:
        return AccelerateReport(
            (), tuple(left), 0.0, (f"{type(model).__name__} {LEFT if left else NOTHING}",)
        )
    images = example_images(model, 2) if images is None else as_batches(images, model)[0]
    check_comparable(model, images, "accelerate", TOLERANCE.get(images.dtype, 1e-4), "leave it as it is")
    gap = _install(model, [(module, new(module)) for _, module, new in found], images)
    rows = tuple((name, type(old).__name__, new.__name__) for name, old, new in found)
    zeros = zero_parameters(model)
    with zeros_at_random(zeros, model):
        proved = depends_on_images(model, images)
    notes = (*_without_gain({new for _, _, new in found}, images.device), *proof_notes(zeros, proved))
    return AccelerateReport(rows, tuple(left), gap, notes)


def _without_gain(kinds: set[type[InPlaceOf]], device: torch.device) -> list[str]:
    """Lines about what the replacements do not make faster."""
    if kinds == {FusedMLP}:
        return ["training gains nothing: the MLPs run in one kernel in inference alone"]
    if FusedTalkingHeads in kinds and device.type != "cuda":
        return [f"talking heads gain nothing on {device.type}: their kernels need a CUDA device"]
    return []


def fuse_mlps(model: nn.Module) -> int:
    """Replace the MLPs alone, where their kernel pays; returns how many that were."""
    mlps = [module for _, module, new in _candidates(model)[0] if new is FusedMLP]
    for module in mlps:
        replace_module(model, module, FusedMLP(module))
    return len(mlps)


def _candidates(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Module, type[InPlaceOf]]], list[tuple[str, str]]]:
    """Path, module and new class of what can be replaced; path and reason of what must stay."""
    found: list[tuple[str, nn.Module, type[InPlaceOf]]] = []
    left: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        new = _faster(module)
        # The model itself has no parent in which something else could be put.
        if new is None or module is model:
            continue
        if reason := _why_left(module, new):
            left.append((name, reason))
        else:
            found.append((name, module, new))
    return found, left


def _install(model: nn.Module, pairs: list[tuple[nn.Module, nn.Module]], images: Tensor) -> float:
    """Replace the first of each pair by the second; undone if that changes the output."""
    before = _outputs(model, images)
    try:
        for old, new in pairs:
            replace_module(model, old, new)
        gap = max(map(difference, before, _outputs(model, images)))
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
def _outputs(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of a model as it is, and with every LayerScale at one and all zeros at random.

    Scales that have barely left their start hide what the branches do, and so also a wrong replacement.
    """
    own = finite_run(model, images, "accelerate")
    zeros = zero_parameters(model)
    scales = [p for name, p in model.named_parameters() if name.rpartition(".")[2] in _SCALES]
    kept = [gamma.clone() for gamma in scales]
    try:
        for gamma in scales:
            gamma.fill_(1.0)
        with zeros_at_random([name for name in zeros if name.rpartition(".")[2] not in _SCALES], model):
            return own, run(model, images)
    finally:
        for gamma, value in zip(scales, kept, strict=True):
            gamma.copy_(value)


def _why_left(module: nn.Module, new: type[nn.Module]) -> str | None:
    """The reason why a module must stay, or None: whatever is no longer called must not have an effect."""
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


def _faster(module: nn.Module) -> type[InPlaceOf] | None:
    """The class that replaces a module, recognised by its name and those of its parts; None for anything else."""
    if isinstance(module, InPlaceOf):
        return None
    children = set(dict(module.named_children()))
    if hasattr(module, "num_heads") and children == _TALKING:
        return FusedTalkingHeads
    name = type(module).__name__.lower().replace("_", "")
    if hasattr(module, "num_heads") and children == _CLASS and name.startswith("classatt"):
        return OneQueryAttention
    return FusedMLP if _MLP <= children <= _MLP | _MLP_EXTRAS and _is_gelu_mlp(module) else None


def _is_gelu_mlp(mlp: nn.Module) -> bool:
    """Whether an MLP is fc2(gelu(fc1(x))) in inference, and its kernel pays where it is now."""
    fc1, fc2 = mlp.get_submodule("fc1"), mlp.get_submodule("fc2")
    if (
        not isinstance(fc1, nn.Linear)
        or not isinstance(fc2, nn.Linear)
        or not is_exact_gelu(mlp.get_submodule("act"))
    ):
        return False
    extras = [part for name, part in mlp.named_children() if name in _MLP_EXTRAS]
    idle = all(type(part) in (nn.Identity, nn.Dropout) for part in extras)
    return idle and fc2.out_features == fc1.in_features and why_not_here(fc1.weight) is None
