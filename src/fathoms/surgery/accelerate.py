"""Replace the attentions of any model by faster modules, on its own parameters under the same names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from fathoms.errors import FathomsError, reason
from fathoms.ops.attention_ops import ClassAttentionImpl, class_attention, talking_heads
from fathoms.parts.linears import has_hooks, is_bare
from fathoms.parts.modes import refuse_script
from fathoms.surgery.inputs import (
    REFUSALS,
    Inputs,
    as_inputs,
    check_model,
    difference,
    dtype_of,
    example_inputs,
    run,
    tensors,
)
from fathoms.surgery.trial import Report, check_comparable, exchanged, proof_notes, watch, zeros_at_random
from fathoms.text_table import aligned

# torch.fx keeps them whole: they look at their inputs to choose a kernel.
fx.wrap("talking_heads")
fx.wrap("class_attention")


class InPlaceOf(nn.Module):
    """The old module in all but its forward: the same parameters, modules, hooks and flags.

    Where a part is no longer what the faster formula reads, such as a linear that was pruned, adapted, quantised or
    hooked since, the old module's own forward runs.
    """

    # The linears whose weights are read; all other parts are called, but attn_drop where it drops nothing.
    reads: tuple[str, ...] = ()
    __prepare_scriptable__ = refuse_script
    attn_drop: nn.Module
    original: nn.Module

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(old.__dict__)
        # It shares the dicts of parameters and modules, and is none of the modules itself.
        self.__dict__["original"] = old

    def why_original(self) -> str | None:
        """The reason why the old forward must run, or None: what is no longer called must not have an effect."""
        for part in self.reads:
            if not is_bare(getattr(self, part)):
                return f"{part} is more than a plain linear or has hooks"
        if has_hooks(self.attn_drop):
            return "attn_drop has hooks, which would not be called"
        if (kind := type(self.attn_drop)) not in (nn.Dropout, nn.Identity):
            return f"its attn_drop is of type {kind.__name__}, which only its own forward calls"
        return None

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B M D"]:
        if self.why_original() is None and not (self.training and getattr(self.attn_drop, "p", 0.0) > 0.0):
            return self.fast(x)  # pyrefly: ignore
        self.original.training = self.training
        return self.original.forward(x)


class FusedTalkingHeads(InPlaceOf):
    """timm's and DeiT's talking-heads attention through `fathoms.ops.attention_ops`."""

    reads = ("proj_l", "proj_w")
    num_heads: int
    scale: float
    qkv: nn.Linear
    proj: nn.Linear
    proj_l: nn.Linear
    proj_w: nn.Linear
    proj_drop: nn.Module

    def fast(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixers = self.proj_l.weight, self.proj_l.bias, self.proj_w.weight, self.proj_w.bias
        out = talking_heads(q, k, v, *mixers, scale=self.scale)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def why_original(self) -> str | None:
        """As for all, and where attention is dropped, which no kernel does."""
        rate = getattr(self.attn_drop, "p", 0.0)
        dropped = f"it drops attention with probability {rate:g}, which no kernel does" if rate else None
        return super().why_original() or dropped


class OneQueryAttention(InPlaceOf):
    """timm's and DeiT's class attention through `fathoms.ops.attention_ops`; its query is the first token."""

    reads = ("k", "v")
    impl: ClassAttentionImpl = "auto"
    num_heads: int
    scale: float
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    proj: nn.Linear
    proj_drop: nn.Module

    def fast(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B 1 D"]:
        q = self.q(x[:, :1]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        weights = self.k.weight, self.k.bias, self.v.weight, self.v.bias
        # The operation divides by sqrt K; the module may have another scale.
        factor = self.scale * (self.k.out_features // self.num_heads) ** 0.5
        out = class_attention(q if factor == 1.0 else q * factor, None, x, *weights, impl=self.impl)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


# The order of summation changes; what is left is rounding, over the largest value of the output.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# The parts of each kind of module, as timm and DeiT call them.
_TALKING = {"qkv", "proj", "proj_l", "proj_w", "attn_drop", "proj_drop"}
_CLASS = {"q", "k", "v", "proj", "attn_drop", "proj_drop"}
NOTHING = "gains nothing: it has no talking heads or class attention as timm and DeiT write them"
LEFT = "gains nothing; it is as it was, for these reasons"


@dataclass(frozen=True)
class AccelerateReport(Report):
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

    def table(self) -> str:
        """One line for each module, then the difference of the output."""
        rows = [*self.rows, *[(name, "left", why) for name, why in self.left]]
        lines = [aligned(("module", "old", "new"), rows)] if rows else []
        if self.rows:
            lines.append(f"output differs by {self.difference:.2g} of its largest value")
        return "\n".join([*lines, *self.notes])


# Modules that may be replaced, by path, each with the faster one.
_Found = dict[str, tuple[nn.Module, InPlaceOf]]


def accelerate(model: nn.Module, *, images: Any = None) -> AccelerateReport:
    """Replace timm's and DeiT's talking heads and class attention by faster modules, in the model itself.

    Parameters, their names, the state_dict and, but for rounding, the output stay the same, in training and in
    inference. Talking heads run in Triton kernels on a CUDA device; class attention needs no keys and values.
    A model with nothing to replace is left as it is, and its report has no rows.

    Args:
        model: Any module.
        images: A batch for the comparison of the output, as for `fold`; None makes random ones of the model's size.

    >>> import timm
    >>> cait = timm.create_model("cait_xxs24_224", depth=1)
    >>> report = accelerate(cait)
    >>> len(report), cait(torch.randn(2, 3, 224, 224)).shape
    (3, torch.Size([2, 1000]))
    """
    check_model(model, "accelerate")
    found: _Found = {}
    left: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if (kind := _faster(module)) is not None:
            new = kind(module)
            if why := _why_left(module, model) or new.why_original():
                left.append((name or "the model", why))
            else:
                found[name] = module, new
    if not found:
        what = LEFT if left else NOTHING
        return AccelerateReport((), tuple(left), 0.0, (f"{type(model).__name__} {what}",))
    inputs = example_inputs(model, 2) if images is None else as_inputs(images, model)
    allowed = TOLERANCE.get(dtype_of(inputs, model), 1e-4)
    check_comparable(model, inputs, "accelerate", allowed, "leave it as it is")
    with zeros_at_random(model) as zeros:
        reasons = _trials(model, found, inputs, allowed)
        pairs = {name: pair for name, pair in found.items() if not reasons[name]}
        before = run(model, inputs)
        with exchanged(model, list(pairs.values())):
            gap = difference(before, run(model, inputs))
            if not gap <= allowed:
                raise FathomsError(
                    f"accelerate: the output moved by {gap:.2g} of its largest value, more than {allowed:g}; "
                    "the model is as it was, please report it"
                )
        notes = proof_notes(zeros, model, inputs) if pairs else (f"{type(model).__name__} {LEFT}",)
    left += [(name, why) for name, why in reasons.items() if why]
    device = tensors(inputs)[0].device.type
    if device != "cuda" and any(isinstance(new, FusedTalkingHeads) for _, new in pairs.values()):
        notes = (f"talking heads gain nothing on {device}: their kernels need a CUDA device", *notes)
    rows = tuple((name, type(old).__name__, type(new).__name__) for name, (old, new) in pairs.items())
    return AccelerateReport(rows, tuple(left), gap, notes)


def _trials(model: nn.Module, found: _Found, inputs: Inputs, allowed: float) -> dict[str, str]:
    """The reasons why modules must stay, of a trial of each on its input in the model; "" for one that agrees.

    The output of the model would not tell: branches at their start weigh too little.
    """
    reasons: dict[str, str] = {}

    def tried(old: nn.Module, new: InPlaceOf, args: tuple[Any, ...], named: dict[str, Any]) -> str:
        if len(args) != 1 or named:
            return f"it is called with {len(args) + len(named)} inputs, and the faster module takes one"
        try:
            gap = difference([old.forward(*args)], [new.forward(*args)])
        except REFUSALS as error:
            return f"the faster module fails in its place ({reason(error)})"
        return "" if gap <= allowed else f"it computes something else: its output would move by {gap:.2g}"

    def see(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        reasons[name] = reasons.get(name) or tried(*found[name], args, named)

    watch(model, inputs, {old: partial(see, name) for name, (old, _) in found.items()})
    return {name: reasons.get(name, "it never runs on these images") for name in found}


def _why_left(module: nn.Module, model: nn.Module) -> str | None:
    """The reason why a module must stay, whatever it computes, or None."""
    if module is model:
        return "the model itself is this module, and has none to put another in; wrap it in nn.Sequential"
    if "forward" in module.__dict__:
        return "something has given it a forward of its own"
    if module._compiled_call_impl is not None:
        return "it is compiled already; accelerate first"
    if module._load_state_dict_pre_hooks:
        return "it has hooks of load_state_dict, which know it alone"
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
    return None
