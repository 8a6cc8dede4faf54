"""Load and save weights: safetensors only, and strict: nothing is skipped silently."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fathoms.errors import WeightsError, flag_of, reason
from fathoms.files import replacing
from fathoms.models import model_sources
from fathoms.models.config import ViTConfig
from fathoms.models.model_sources import resolve_weights
from fathoms.models.weight_names import (
    State,
    from_timm,
    layout_of,
    misfits,
    resize_positions,
    to_timm,
    unwrap,
)
from fathoms.models.weights_file import RECORD, check_header, check_recorded_hash
from fathoms.registry import check_name

# Parameters that an error lists by name.
SHOWN = 6
# Elements that a model may hold beyond its weights file: positions of a larger image, rotation tables.
_ROOM = 1 << 26


class MisfitError(WeightsError):
    """Weights of another model.

    `plain` is the message without the flags of a model, which not every command has. `settings` are those that differ,
    each with its value in the weights and in the model; empty where the names of the parameters do not tell.
    """

    plain = ""
    settings: Mapping[str, tuple[object, object]] = MappingProxyType({})


@dataclass(frozen=True)
class LoadReport:
    """Result of `load_weights`.

    Args:
        source: The file, or the Hub repository with the commit that was read.
        layout: The naming scheme of the file: "fathoms" or "timm".
        resized: Side of the position grid before and after, if it was resized.
        skipped: Parameters that `skip` excluded.
    """

    source: str
    layout: str
    resized: tuple[int, int] | None
    skipped: tuple[str, ...]


class Described(nn.Module):
    """A module that its config describes: weights are loaded into it, saved from it, and it is built for a file."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        # What its record or card says beyond the config (name, preprocessing, classes), for the card of
        # `save_pretrained`; empty for a new model.
        self.card: dict[str, Any] = {}


M = TypeVar("M", bound=Described)


@torch.no_grad()
def refill_tables(model: nn.Module, _keys: Any = None) -> None:
    """Fill the tables that are not saved: a model from the meta device or `to_empty` holds none, or anything."""
    home = next(model.parameters()).device
    for module in model.modules():
        tables = module._buffers
        if tables and not module._parameters and tables.keys() <= module._non_persistent_buffers_set:
            for name, table in tables.items():
                if table is not None and table.is_meta:
                    tables[name] = torch.empty_like(table, device=home)
            cast(Any, module).reset_parameters()


def read_tensors(path: Path, name: str) -> State:
    """The tensors of a safetensors file, called `name` in errors; it must be what was saved."""
    check_header(path, name)
    check_recorded_hash(path, name)
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise WeightsError(
            f"{name}: not a readable safetensors file ({reason(error)}); fetch it again"
        ) from error


def _read(source: str | Path | Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """The name of a source and its tensors."""
    if isinstance(source, Mapping):
        odd = next((key for key in source if not isinstance(key, str)), None)
        if odd is not None:
            raise WeightsError(f"state_dict: {odd!r} is no name of a parameter; give a state_dict")
        return "state_dict", source
    if not isinstance(source, str | Path):
        raise WeightsError(f"weights: {type(source).__name__} holds none; give a path or a state_dict")
    if isinstance(source, Path) or (named := resolve_weights(source)).kind != "hub":
        path = Path(source)
        # The folder of `save_pretrained`.
        path = path / model_sources.FILE if (path / model_sources.FILE).is_file() else path
        return str(path), read_tensors(path, str(path))
    path, name = model_sources.fetch(named.text)
    return name, read_tensors(path, name)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _check_kinds(state: State, name: str) -> None:
    """Weights are floating-point numbers; anything else would be cast silently."""
    odd = next((key for key, value in state.items() if not value.is_floating_point()), None)
    if odd is not None:
        kind = str(state[odd].dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name}: {odd[:80]!r} holds {kind} values, not weights; it is not a checkpoint of a ViT"
        )
    empty = next(
        (key for key, value in state.items() if value.is_meta or value.layout != torch.strided), None
    )
    if empty is not None:
        raise WeightsError(
            f"{name}: {empty[:80]!r} is sparse or on the meta device; give dense tensors with values"
        )


def _check(own: State, given: State, name: str, differ: Mapping[str, tuple[object, object]]) -> None:
    """Every parameter must be given, in its shape, and nothing else; else `differ` has the settings to name."""
    missing = [key for key in own if key not in given]
    extra = [key for key in given if key not in own]
    wrong = [
        f"{key} {tuple(given[key].shape)} for {tuple(own[key].shape)}"
        for key in own
        if key in given and given[key].shape != own[key].shape
    ]
    faults = {"missing": missing, "not in the model": extra, "wrong shape": wrong}
    found = [f"{fault}: {_list(keys)}" for fault, keys in faults.items() if keys]
    if not found:
        return
    error = MisfitError(f"{name} does not fit the model: {_advice(differ) or '; '.join(found)}")
    if differ:
        error.settings = differ
        error.plain = f"{name} does not fit the model: {said(differ)}; give the --model of these weights"
    for fault, keys in faults.items():
        error.add_note(f"{fault}: {', '.join(keys) or 'none'}")
    raise error


def said(differ: Mapping[str, tuple[object, object]]) -> str:
    """Settings that differ, in words."""
    return ", ".join(f"{name} {theirs} against {own}" for name, (theirs, own) in differ.items())


def _advice(differ: Mapping[str, tuple[object, object]]) -> str:
    """The settings that differ, and what to do about them."""
    if not differ:
        return ""
    if set(differ) == {"num_classes"}:
        return (
            f"{said(differ)}; to start a new classifier, give --initial-head new "
            '(in Python load_weights with skip=["head*"])'
        )
    flags = [
        flag_of(name)
        if theirs is True
        else f"--no-{flag_of(name)[2:]}"
        if theirs is False
        else f"{flag_of(name)} {theirs}"
        for name, (theirs, _) in differ.items()
        if name != "num_classes"
    ]
    return f"{said(differ)}; build it with {' '.join(flags)}, or give the --model of these weights"


def _other_grid(table: Tensor, target: Tensor) -> bool:
    """Whether two position tables differ in the number of positions only."""
    return table.ndim == 2 and table.shape[1:] == target.shape[1:] and table.shape[0] != target.shape[0]


def settle_class_token(own: State, given: State) -> None:
    """Add a class token and its position where the model has only their sum; a token without a position gets zeros."""
    token, position = "readout.queries", "readout.positions"
    if token not in given or (position in given) == (position in own):
        return
    if position in own:
        given[position] = torch.zeros_like(given[token])
    elif given[token].shape == given[position].shape:
        given[token] = given[token] + given.pop(position)


@torch.no_grad()
def load_weights(
    model: Described,
    source: str | Path | Mapping[str, object],
    *,
    skip: Sequence[str] = (),
    antialias: bool = True,
) -> LoadReport:
    """Load the weights of a file, a Hub repository or a state_dict into a model, strictly.

    timm's, DeiT's, CaiT's, LearnableScaler's and fathoms' names are recognised, and a convolution as
    patch projection. Learned positions are resized when the grid differs; a class token with a position of its own
    and one without are the same function, and either fills the other. A missing, extra or mis-shaped tensor is an
    error, and so is a record in the file, or a run or a card beside it, that tells of another function of the same
    tensors, such as other heads; the model is then unchanged.

    Args:
        model: The model to fill.
        source: A .safetensors file, a folder of `save_pretrained`, "hf-hub:OWNER/NAME[@REVISION]",
            "timm/NAME[@REVISION]" for timm's own weights on the Hub, or a state_dict.
        skip: Patterns of parameters that keep their values, for example ["head*"] for another label set.
        antialias: Whether positions are resized with antialiasing, as in timm; DeiT's own code, which fine-tuned its
            384-pixel models, does without.

    >>> from fathoms import create_model
    >>> old = create_model("vit_digits", depth=2)
    >>> new = create_model("vit_digits", depth=2, image_size=16)
    >>> report = load_weights(new, old.state_dict())
    >>> old.position.table.shape, new.position.table.shape
    (torch.Size([16, 64]), torch.Size([64, 64]))
    """
    name, raw = _read(source)
    state = unwrap(raw)
    layout = layout_of(state)
    _check_kinds(state, name)
    if (
        layout == "timm"
        and any(key.startswith("fc_norm.") for key in state)
        and model.config.readout != "mean_cls"
    ):
        raise WeightsError(
            f"{name}: takes the norm of the patches' mean (fc_norm), unlike readout {model.config.readout!r}; build "
            "the model with readout='mean_cls'"
        )
    given = from_timm(state) if layout == "timm" else state
    own: State = dict(model.named_parameters())
    settle_class_token(own, given)
    skipped = tuple(key for key in own if any(fnmatch.fnmatch(key, pattern) for pattern in skip))
    for pattern in skip:
        if not fnmatch.filter(own, pattern):
            raise WeightsError(f"load_weights: skip pattern {pattern!r} matches no parameter of the model")
    own = {key: value for key, value in own.items() if key not in skipped}
    given = {key: value for key, value in given.items() if key not in skipped}
    resized = None
    table, target = given.get("position.table"), own.get("position.table")
    if table is not None and target is not None and _other_grid(table, target):
        given["position.table"] = resize_positions(table, model.config.grid, antialias)
        resized = (round(table.shape[0] ** 0.5), model.config.grid)
    shapes = {key: tuple(value.shape) for key, value in given.items()}
    _check(own, given, name, misfits(model.config, shapes, skipped))
    if not isinstance(source, Mapping) and Path(name).is_file():
        # Weights that fit by their shapes may be of other heads, norms or placements.
        from fathoms.models.training_record import record_beside

        record_beside(Path(name)).check_model(model.config, name)
    if any(parameter.is_meta for parameter in own.values()):
        raise WeightsError("load_weights: the model is on the meta device; model.to_empty(device=...) first")
    for key, parameter in own.items():
        parameter.copy_(given[key])
    refill_tables(model)
    return LoadReport(name, layout, resized, skipped)


def weights_of(model: nn.Module, saved: Collection[str] | None = None) -> State:
    """Parameters and saved buffers of any model, each once under its first name.

    Args:
        model: Whose weights.
        saved: Names that are saved, where the caller has them already: listing them takes half of the time.
    """
    saved = model.state_dict().keys() if saved is None else saved
    buffers = {name: value for name, value in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


@torch.no_grad()
def put_weights(
    model: nn.Module,
    given: State,
    where: str,
    spread_like: Callable[[Tensor, Tensor], Tensor] = lambda given, _: given,
) -> None:
    """Copy weights into any model that has exactly these names and shapes.

    Args:
        model: Where the weights go.
        given: Every parameter and saved buffer, whole.
        where: Prefix of error messages.
        spread_like: Distributes a whole tensor like the model's own, where the model is sharded.
    """
    own = weights_of(model)
    if own.keys() != given.keys():
        odd = min(own.keys() ^ given.keys())
        raise WeightsError(
            f"{where}: {odd!r} is in the model or in the checkpoint only; they do not belong together"
        )
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise WeightsError(f"{where}: {name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}")
        tensor.copy_(spread_like(given[name], tensor))


def build_for(kind: type[M], config: ViTConfig, path: str | Path) -> M:
    """Build the model of a weights file, after checking that the file can fill it; the weights are not loaded.

    An untrusted config may describe a model that fills the machine, so its size is computed on the meta device,
    without memory, and compared with the size of the file.
    """
    shapes = check_header(Path(path), str(path))
    held = sum(math.prod(shape) for shape in shapes.values())
    blocks = config.depth + (config.class_attention_depth if config.readout == "class_attention" else 0)
    if blocks > len(shapes):
        raise WeightsError(f"{path}: holds {len(shapes)} tensors, too few for a model of {blocks} blocks")
    with torch.device("meta"):
        described = kind(config)
    check_size(described, held, path)
    return kind(config)


def check_size(described: nn.Module, held: int, path: str | Path) -> None:
    """Refuse a model, built without memory on the meta device, that is far larger than its weights file."""
    needed = sum(value.numel() for value in [*described.parameters(), *described.buffers()])
    if needed > 2 * held + _ROOM:
        raise WeightsError(
            f"{path}: holds {held:,} numbers, but the config describes a model of {needed:,}; "
            "they do not belong together"
        )


def save_weights(model: Described, path: str | Path, layout: str = "fathoms") -> None:
    """Write a model's weights to a safetensors file, atomically.

    Args:
        model: The model to save.
        path: The file; its folder must exist.
        layout: "fathoms", or "timm" for a file that loads strictly into timm's model of that kind.

    >>> import tempfile
    >>> from fathoms import create_model
    >>> model = create_model("vit_tiny_patch16_224", depth=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(model, f"{folder}/for_timm.safetensors", layout="timm")
    """
    check_name(layout, ("fathoms", "timm"), "layout", "save_weights")
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path}: weights are saved as .safetensors; change the ending")
    if not path.parent.is_dir():
        raise WeightsError(f"{path}: the folder does not exist; create it first")
    state: State = {name: value.detach() for name, value in model.named_parameters()}
    state = to_timm(state, model.config) if layout == "timm" else state
    with replacing(path) as temporary:
        whole = {name: value.cpu().contiguous() for name, value in state.items()}
        record = json.dumps({"config": model.config.to_dict()})
        save_file(whole, temporary, metadata={"format": "pt", RECORD: record})
