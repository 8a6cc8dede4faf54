"""Norms of a model: those that can be swapped, those that stay with the reason, and the choice among them."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from fathoms.errors import FathomsError, reason
from fathoms.parts.modes import hooked
from fathoms.registry import hint
from fathoms.surgery.inputs import REFUSALS, Inputs, as_inputs, check_model, example_inputs, first, run
from fathoms.surgery.norm_forms import Form, NotThisNormError, is_called_norm, may_be_norm, recognise
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
        """Number of channels."""
        return self.form.dim


Choice = str | int | Sequence[str] | Sequence[int] | range | Callable[[NormSite], bool]


@dataclass(frozen=True)
class Norms:
    """The norms of a model, as `norms` finds them.

    Args:
        sites: Those that can be swapped, in the order of the modules.
        left: Path of each norm that cannot, and the reason; also where a norm is called as a function.
        notes: Why the model could not be run, so that functions were not looked for.
    """

    sites: tuple[NormSite, ...]
    left: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[NormSite]:
        return iter(self.sites)

    def table(self) -> str:
        """One line for each norm."""
        header = ("norm", "class", "computes", "channels", "gain", "then")
        rows = []
        for site, form in ((site, site.form) for site in self.sites):
            gain = f"1 + {form.gain}" if form.one_plus else form.gain or ""
            channels = f"{form.dim} {'last' if form.layout == 'last' else 'second'}"
            old = type(site.module).__name__
            rows.append((site.name, old, form.kind, channels, gain, form.activation or ""))
        rows += [(name or "the model", "left", "", "", "", why) for name, why in self.left]
        count = f"{len(self.sites)} norms can be swapped, {len(self.left)} stay"
        return "\n".join([aligned(header, rows), count, *self.notes] if rows else [count, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The norms as plain data."""
        of = [{"name": s.name, "class": type(s.module).__name__, "depth": s.depth} for s in self.sites]
        sites = [{**each, **asdict(site.form)} for each, site in zip(of, self.sites, strict=True)]
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


def known_inputs(model: nn.Module) -> Inputs | None:
    """Random inputs of a model that says what it takes; None for others, and for one without memory."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    try:
        return example_inputs(model, 2)
    except FathomsError:
        return None


def find_norms(model: nn.Module, inputs: Inputs | None) -> Norms:
    """The norms of a model, watched on `inputs` if there are any; see `norms`."""
    tried = {module: name for name, module in model.named_modules() if may_be_norm(module)}
    watch, notes = _Watch(model, set(tried)), []
    if inputs is not None:
        try:
            watch.see(first(inputs, 2))
        except REFUSALS as error:
            watch = _Watch(model, set(tried))
            notes.append(f"the model fails on its example inputs ({reason(error)}); pass images=")
    sites: list[NormSite] = []
    left: dict[str, str] = {}
    blocks: dict[str, int] = {}
    inside: tuple[nn.Module, ...] = ()
    for module, name in tried.items():
        if any(module is part for part in inside) or ".parametrizations." in f".{name}.":
            continue
        calls = watch.calls.get(module, _Calls())
        try:
            if odd := calls.odd or _more_than_its_forward(module, bool(calls.shapes)):
                raise NotThisNormError(odd)
            form = recognise(module, calls.shapes)
        except NotThisNormError as error:
            if is_called_norm(module):
                left[name] = str(error)
            continue
        if form is None:
            continue
        inside = tuple(part for part in module.modules() if part is not module)
        block = _block_of(name)
        depth = None if block is None else blocks.setdefault(block, len(blocks))
        sites.append(NormSite(name, module, form, depth, bool(calls.shapes) if watch.calls else None))
    for name, called in watch.functions.items():
        left[name] = (
            f"calls {called} as a function, which cannot be swapped; make it a module such as nn.LayerNorm"
        )
    return Norms(tuple(sites), tuple(left.items()), tuple(notes))


def find_sites(model: nn.Module) -> list[NormSite]:
    """The norms of a model that can be swapped, in the order of its modules; a norm that is shared is one site."""
    return list(find_norms(model, known_inputs(model)).sites)


@dataclass
class _Calls:
    """Inputs that a module gets: their shapes, or what is odd about them."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    odd: str = ""


class _Watch(TorchFunctionMode):
    """Records the inputs of modules that may be norms, and each norm function called outside of them."""

    def __init__(self, model: nn.Module, tried: set[nn.Module]) -> None:
        super().__init__()
        self.model, self.tried = model, tried
        self.stack: list[tuple[str, nn.Module]] = []
        self.calls: dict[nn.Module, _Calls] = {}
        self.functions: dict[str, str] = {}
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS and not any(module in self.tried for _, module in self.stack):
            given = args[0] if args else kwargs["input"]
            # Weight standardisation normalises weights, which is no norm of the network.
            if given.untyped_storage().data_ptr() not in self.weights:
                self.functions[self.stack[-1][0] if self.stack else ""] = func.__name__
        return func(*args, **kwargs)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        self.stack.append((name, module))
        if module not in self.tried:
            return
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        calls = self.calls.setdefault(module, _Calls())
        if len(given) != 1:
            calls.odd = f"it is called with {len(given)} inputs"
        elif not isinstance(given[0], Tensor) or given[0].ndim < 2:
            calls.odd = "its input is no tensor of tokens or maps"
        elif tuple(given[0].shape) not in calls.shapes:
            calls.shapes.append(tuple(given[0].shape))

    def see(self, inputs: Inputs) -> None:
        """Run the model once."""
        handles = []
        for name, module in self.model.named_modules():
            enter = partial(self.enter, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(
                module.register_forward_hook(lambda *_: self.stack.pop() and None, always_call=True)
            )
        with hooked(*handles), self:
            run(self.model, inputs)


def _more_than_its_forward(module: nn.Module, seen: bool) -> str:
    """What a norm does beside its forward and a new one would not; of one not seen, that it takes several inputs."""
    if is_parametrized(module):
        return "it is parametrised; torch.nn.utils.parametrize.remove_parametrizations first"
    if any(vars(module)[f"_{kind}_hooks"] for kind in ("forward_pre", "forward", "backward_pre", "backward")):
        return "it has hooks, which the new norm would not call; remove them first"
    taken = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in taken if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    several = len(names) > 1 and not seen
    return f"it takes {', '.join(names)}; pass a batch that shows which of them it gets" if several else ""


def _block_of(name: str) -> str | None:
    """The path up to the last numbered container, such as "layers.0.blocks.1" of "layers.0.blocks.1.norm2"."""
    pieces = name.split(".")
    numbered = [i for i, n in enumerate(pieces) if n.isdigit() or re.fullmatch(r".*layer_?\d+", n)]
    return ".".join(pieces[: numbered[-1] + 1]) if numbered else None


def _by_pattern(found: Norms, patterns: Iterable[str]) -> list[NormSite]:
    left = dict(found.left)
    names = [*(site.name for site in found.sites), *left]
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise FathomsError(f"swap_norms: only={pattern!r} matches no norm; {hint(pattern, names)}")
        if all(name in left for name in matched):
            raise FathomsError(f"{matched[0] or 'the model'}: {left[matched[0]]}; leave it out of only=")
        chosen.update(matched)
    return [site for site in found.sites if site.name in chosen]


def choose_sites(found: Norms, only: Choice | None) -> list[NormSite]:
    """The sites that `only` picks: all for None; a choice that picks nothing is an error.

    Args:
        found: The norms of a model, with one site at least.
        only: Shell patterns over names, depths or a range of them, or a function of a site.
    """
    sites = list(found.sites)
    if only is None:
        return sites
    listed = [only] if isinstance(only, str | int) else only
    several: list[Any] = list(listed) if isinstance(listed, Iterable) else [None]
    if isinstance(only, range) or (several and all(type(each) is int for each in several)):
        depths = sorted({site.depth for site in sites if site.depth is not None})
        missing = not isinstance(only, range) and not set(several).issubset(depths)
        none = "a block without a" if missing else "no"
        chosen = [] if missing else [site for site in sites if site.depth in several]
        problem = f"only={only} holds {none} norm; the blocks with norms are {depths[:1]} to {depths[-1:]}"
    elif callable(only):
        chosen = [site for site in sites if only(site)]
        problem = f"the function given as only= picks none of {len(sites)} norms"
    elif not all(isinstance(each, str) for each in several):
        raise FathomsError(
            f"swap_norms: only={only!r} is no choice; give patterns of names, indices of blocks or a function"
        )
    else:
        chosen = _by_pattern(found, several)
        problem = f"only={only!r} names none of {len(sites)} norms"
    if not chosen:
        raise FathomsError(f"swap_norms: {problem}; see fathoms.norms(model)")
    return chosen
