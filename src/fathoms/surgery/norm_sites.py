"""Norms of a model: those that can be swapped, those that stay with the reason, and the choice among them."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from fathoms.errors import FathomsError, reason
from fathoms.parts.modes import hooked
from fathoms.registry import hint
from fathoms.surgery.inputs import REFUSALS, Inputs, as_inputs, check_model, known_inputs, run
from fathoms.surgery.norm_forms import Form, NotThisNormError, is_called_norm, may_be_norm, recognise
from fathoms.surgery.trial import Report
from fathoms.text_table import aligned

_FUNCTIONS = {F.layer_norm, F.rms_norm, F.batch_norm, F.group_norm, F.instance_norm}
_FUNCTIONS |= {torch.layer_norm, torch.rms_norm, torch.batch_norm, torch.group_norm, torch.instance_norm}


@dataclass(frozen=True)
class NormSite:
    """One norm of a model that can be swapped.

    Args:
        name: Its path in the model.
        module: The module there.
        form: The function that it was found to compute.
        depth: Index of its block among the blocks that hold a norm; None outside of blocks.
        ran: Whether it was called when the model was watched; None if that was not possible.
    """

    name: str
    module: nn.Module
    form: Form
    depth: int | None
    ran: bool | None = None

    @property
    def kind(self) -> str:
        """Its name in the norm registry, or "batchnorm" or "groupnorm"."""
        return self.form.kind

    @property
    def dim(self) -> int:
        return self.form.dim


Choice = str | int | Sequence[str] | Sequence[int] | range | Callable[[NormSite], bool]


@dataclass(frozen=True)
class Norms(Report):
    """The norms of a model, as `norms` finds them.

    Args:
        rows: Those that can be swapped, in the order of the modules.
        left: Path of each norm that cannot, and the reason; also where a norm is called as a function.
        notes: Why the model could not be run, so that functions were not looked for.
    """

    rows: tuple[NormSite, ...]
    left: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """One line for each norm."""
        header = ("norm", "class", "computes", "channels", "gain", "then")
        rows = []
        for site, form in ((site, site.form) for site in self.rows):
            gain = f"1 + {form.gain}" if form.one_plus else form.gain or ""
            channels = f"{form.dim} {'last' if form.layout == 'last' else 'second'}"
            rows.append((site.name, type(site.module).__name__, form.kind, channels, gain, form.after or ""))
        rows += [(name or "the model", "left", "", "", "", why) for name, why in self.left]
        count = f"{len(self.rows)} norms can be swapped, {len(self.left)} stay"
        return "\n".join([aligned(header, rows), count, *self.notes] if rows else [count, *self.notes])

    def to_json(self) -> dict[str, Any]:
        sites = [
            {"name": s.name, "class": type(s.module).__name__, "depth": s.depth, **asdict(s.form)}
            for s in self
        ]
        return {"sites": sites, "left": [list(pair) for pair in self.left], "notes": list(self.notes)}


def norms(model: nn.Module, *, images: Any = None) -> Norms:
    """The norms of a model and what each computes; changes nothing.

    A module is recognised by what it computes, not by its class: see `fathoms.surgery.norm_forms`. One forward pass
    shows the shapes of their inputs, and norms that are called as functions.

    Args:
        model: Any module.
        images: A batch for that pass: a tensor, a tuple of the arguments of `forward` or a dict of them. None draws
            random ones where the model says what it takes, and looks at the modules alone where it does not.

    >>> from fathoms import create_model
    >>> [site.kind for site in norms(create_model("vit_digits", depth=1, num_classes=10))]
    ['layernorm', 'layernorm', 'layernorm']
    """
    check_model(model, "norms")
    return find_norms(model, as_inputs(images, model) if images is not None else known_inputs(model))


def find_norms(model: nn.Module, inputs: Inputs | None) -> Norms:
    """The norms of a model, watched on `inputs` if there are any; see `norms`."""
    tried = {module: name for name, module in model.named_modules() if may_be_norm(module)}
    seen, notes = _Watch(), []
    if inputs is not None:
        try:
            seen.see(model, inputs)
        except REFUSALS as error:
            seen = _Watch()
            notes.append(f"the model fails on its example inputs ({reason(error)}); pass images=")
    sites: list[NormSite] = []
    left: dict[str, str] = {}
    blocks: dict[str, int] = {}
    inside: set[nn.Module] = set()
    for module, name in tried.items():
        if module in inside or ".parametrizations." in f".{name}.":
            continue
        calls = seen.calls.get(module, [])
        try:
            form = recognise(module, _shapes(module, calls))
        except NotThisNormError as error:
            if error.is_norm or is_called_norm(module):
                left[name] = str(error)
            continue
        if form is None:
            continue
        inside.update(part for part in module.modules() if part is not module)
        block = _block_of(name)
        depth = None if block is None else blocks.setdefault(block, len(blocks))
        sites.append(NormSite(name, module, form, depth, bool(calls) if seen.calls else None))
    known = {*left, *(site.name for site in sites)}
    for name, called in seen.functions.items():
        why = f"calls {called} as a function, which cannot be swapped; make it a module such as nn.LayerNorm"
        left |= {} if name in known else {name: why}
    return Norms(tuple(sites), tuple(left.items()), tuple(notes))


class _Watch(TorchFunctionMode):
    """Records the arguments of every module, and the module that calls each norm function."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.calls: dict[nn.Module, list[list[Any]]] = {}
        self.functions: dict[str, str] = {}
        self.weights: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            given = args[0] if args else kwargs["input"]
            # Weight standardisation normalises weights, which is no norm of the network.
            if given.untyped_storage().data_ptr() not in self.weights:
                self.functions[self.stack[-1]] = func.__name__
        return func(*args, **kwargs)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(name)
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        self.calls.setdefault(module, []).append([getattr(value, "shape", None) for value in given])

    def leave(self, *_: Any) -> None:
        self.stack.pop()

    def see(self, model: nn.Module, inputs: Inputs) -> None:
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        # A scripted module takes no hooks.
        named = [(n, m) for n, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
        handles = [m.register_forward_pre_hook(partial(self.enter, n), with_kwargs=True) for n, m in named]
        handles += [module.register_forward_hook(self.leave, always_call=True) for _, module in named]
        with hooked(*handles), torch.compiler.set_stance("force_eager"), self:
            run(model, inputs)


def _shapes(module: nn.Module, calls: list[list[Any]]) -> list[tuple[int, ...]]:
    """Shapes of the inputs of a norm; refused if it does more than its forward on one tensor, as a new one would."""
    if is_parametrized(module):
        why = "it is parametrised; torch.nn.utils.parametrize.remove_parametrizations first"
        raise NotThisNormError(why)
    if any(vars(module)[f"_{kind}_hooks"] for kind in ("forward_pre", "forward", "backward_pre", "backward")):
        raise NotThisNormError("it has hooks, which the new norm would not call; remove them first")
    if odd := [shapes for shapes in calls if len(shapes) != 1]:
        raise NotThisNormError(f"it is called with {len(odd[0])} inputs")
    if any(shapes[0] is None or len(shapes[0]) < 2 for shapes in calls):
        raise NotThisNormError("its input is no tensor of tokens or maps")
    taken = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in taken if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(names) > 1 and not calls:
        raise NotThisNormError(f"it takes {', '.join(names)}; pass a batch that shows which of them it gets")
    return list(dict.fromkeys(tuple(shapes[0]) for shapes in calls))


def _block_of(name: str) -> str | None:
    """The path up to the last numbered container, such as "layers.0.blocks.1" of "layers.0.blocks.1.norm2"."""
    pieces = name.split(".")
    numbered = [i for i, n in enumerate(pieces) if n.isdigit() or re.fullmatch(r".*layer_?\d+", n)]
    return ".".join(pieces[: numbered[-1] + 1]) if numbered else None


def choose_sites(found: Norms, only: Choice | None) -> list[NormSite]:
    """The sites that `only` picks, as `swap_norms` says; a choice that picks nothing is an error."""
    sites = list(found.rows)
    listed: list[Any] = (
        [only] if isinstance(only, str | int) or not isinstance(only, Iterable) else list(only)
    )
    if only is None:
        chosen, problem = sites, ""
    elif isinstance(only, range) or (listed and all(type(each) is int for each in listed)):
        depths = sorted({site.depth for site in sites if site.depth is not None})
        missing = not isinstance(only, range) and not set(listed).issubset(depths)
        none = "a block without a" if missing else "no"
        chosen = [] if missing else [site for site in sites if site.depth in listed]
        problem = f"only={only} holds {none} norm; the blocks with norms are {depths[:1]} to {depths[-1:]}"
    elif callable(only):
        chosen = [site for site in sites if only(site)]
        problem = f"the function given as only= picks none of {len(sites)} norms"
    elif not all(isinstance(each, str) for each in listed):
        why = "is no choice; give patterns of names, indices of blocks or a function"
        raise FathomsError(f"swap_norms: only={only!r} {why}")
    else:
        left = dict(found.left)
        names = [*(site.name for site in sites), *left]
        for pattern in listed:
            matched = fnmatch.filter(names, pattern)
            if not matched:
                raise FathomsError(f"swap_norms: only={pattern!r} matches no norm; {hint(pattern, names)}")
            if left.keys() >= set(matched):
                raise FathomsError(f"{matched[0] or 'the model'}: {left[matched[0]]}; leave it out of only=")
        chosen = [site for site in sites if any(fnmatch.fnmatch(site.name, pattern) for pattern in listed)]
        problem = f"only={only!r} names none of {len(sites)} norms"
    if not chosen:
        raise FathomsError(f"swap_norms: {problem}; see fathoms.norms(model)")
    return chosen
