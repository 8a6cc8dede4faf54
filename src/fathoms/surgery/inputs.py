"""Inputs and outputs of any model, and the comparison of two outputs.

A model takes one tensor, a tuple of arguments or a dict of keyword arguments: its inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fathoms.errors import FathomsError, reason
from fathoms.parts.modes import in_inference

# Where libraries keep the image size of a model; the first that is found counts.
_SIZES = ("config.image_size", "config.vision_config.image_size", "patch_embed.img_size", "stem.img_size")
_SIZES += ("image_size", "img_size")

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]

# What the code of another library may raise on inputs that it does not take.
REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FathomsError,
    LookupError,
    RuntimeError,
    TypeError,
)
REFUSALS += (ValueError,)

# Parameters that are added: at zero they hide nothing.
_ADDED = ("bias", "beta", "shift", "b")
_SHOWN = 3


@dataclass(frozen=True)
class Report:
    """What the reports of surgery share: they count and give their rows, and are plain data."""

    rows: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def home_of(module: nn.Module) -> dict[str, torch.device | torch.dtype]:
    """Device and dtype of a module's parameters, or nothing where it has none."""
    tensor = next(module.parameters(), None)
    return {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}


def check_model(model: Any, where: str) -> None:
    """Refuse what is not a model, such as its name or its weights, and one whose modules cannot be changed."""
    if isinstance(model, torch.jit.ScriptModule):
        why = "a scripted model cannot be changed; give it as it was before torch.jit"
    elif isinstance(model, nn.Module):
        lazy = [name for name, tensor in model.named_parameters() if is_lazy(tensor)]
        if not lazy:
            return
        why = f"{lazy[0]} has no shape yet; run the model once first"
    elif isinstance(model, type) and issubclass(model, nn.Module):
        why = f"{model.__name__} is a class; give a model that is built"
    elif isinstance(model, str):
        why = f"{model!r} is a name; build the model first, with fathoms.create_model or timm"
    else:
        why = f"a {type(model).__name__} is not a model; give an nn.Module with its weights loaded"
    raise FathomsError(f"{where}: {why}")


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, dict):
        return dict(zip(inputs, mapped(tuple(inputs.values()), change), strict=True))
    return tuple(change(value) if isinstance(value, Tensor) else value for value in inputs)


def exactly(inputs: Inputs) -> Inputs:
    """The inputs in float64."""
    return mapped(inputs, lambda t: t.double() if t.is_floating_point() else t)


def tensors(inputs: Inputs) -> list[Tensor]:
    """The tensors among the inputs."""
    found: list[Tensor] = []
    mapped(inputs, lambda tensor: found.append(tensor) or tensor)
    return found


def first(inputs: Inputs, count: int) -> Inputs:
    """The first samples of a batch."""
    return repeated(inputs, range(min(count, size_of(inputs))))


def repeated(inputs: Inputs, places: Iterable[int]) -> Inputs:
    """The samples of a batch at these places."""
    size, listed = size_of(inputs), list(places)
    return mapped(inputs, lambda value: value[listed] if value.ndim and len(value) == size else value)


def resized(inputs: Inputs) -> Iterator[Inputs]:
    """Inputs of other sizes, made of the same values: images, maps, sequences; a model need not take them.

    Token ids only become fewer: more of them may be out of a table's range, which a GPU does not survive.
    """
    like = tensors(inputs)[0]
    ways = {2: [(1,)], 3: [(1,), (2,)], 4: [(2, 3), (1, 2)], 5: [(3, 4), (2,)]}.get(like.ndim, [])
    for axes in ways:
        sizes = [like.shape[axis] for axis in axes]
        # The usual patches are 4, 8, 14, 16 and 32 pixels wide; windows are of some patches.
        steps = (4, 8, 14, -16, 32, -min(sizes) // 2) if min(sizes) >= 32 else (1, 2, -1, -min(sizes) // 2)
        for step in steps if like.is_floating_point() else (-1, -3):
            # A single channel would be broadcast by a scale of many.
            if min(sizes) + step < 2:
                continue
            yield mapped(inputs, partial(_resized, axes=axes, sizes=sizes, step=step))


def _resized(value: Tensor, axes: tuple[int, ...], sizes: list[int], step: int) -> Tensor:
    if value.ndim <= max(axes) or [value.shape[axis] for axis in axes] != sizes:
        return value
    for axis, size in zip(axes, sizes, strict=True):
        value = value.index_select(axis, torch.arange(size + step, device=value.device) % size)
    return value


def size_of(inputs: Inputs) -> int:
    """Number of samples of a batch."""
    return len(tensors(inputs)[0])


def dtype_of(inputs: Inputs, model: nn.Module) -> torch.dtype:
    """The dtype that sets how far a model rounds: the coarsest of its weights and inputs."""
    found = {t.dtype for t in (*tensors(inputs), *model.parameters()) if t.is_floating_point()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def shapes_of(inputs: Inputs) -> str:
    """The shapes of inputs, as errors name them."""
    return ", ".join(str(tuple(value.shape)) for value in tensors(inputs))


def as_inputs(given: Any, model: nn.Module) -> Inputs:
    """One batch as `images=` takes it: a tensor, a tuple of arguments or a dict, where the model's weights are."""
    inputs = dict(given) if isinstance(given, Mapping) else tuple(given) if isinstance(given, list) else given
    if not isinstance(inputs, Tensor | tuple | dict) or not tensors(inputs):
        raise FathomsError(
            f"batches: a {type(given).__name__} is not a batch; give a tensor, or a tuple or dict of them"
        )
    for value in tensors(inputs):
        if not value.numel():
            shape = tuple(value.shape)
            raise FathomsError(f"batches: one of shape {shape} holds no images; give at least one")
        if not value.isfinite().all():
            raise FathomsError("batches: an image holds values that are not finite; leave it out")
    home = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return mapped(inputs, lambda t: t.to(home.device, home.dtype if t.is_floating_point() else t.dtype))


def as_batches(given: Any, model: nn.Module) -> list[Inputs]:
    """The batches of one tensor or dict, or of an iterable of tensors, dicts or (inputs ..., labels)."""
    listed = given if isinstance(given, Iterable) and not isinstance(given, Tensor | Mapping) else [given]
    batches = []
    for batch in listed:
        if isinstance(batch, tuple | list):
            # Of (images, labels) a model takes the images; one of two inputs takes both.
            batch = tuple(batch[: _arguments(model)])
            batch = batch[0] if len(batch) == 1 else batch
        batches.append(as_inputs(batch, model))
    if not batches:
        raise FathomsError("batches: there are none; give at least one batch of images")
    return batches


def _arguments(model: nn.Module) -> int:
    """Number of inputs that a model cannot do without; 1 at least."""
    taken = inspect.signature(model.forward).parameters.values()
    plain = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return max(1, sum(p.default is p.empty for p in plain))


def image_shape(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model of fathoms, timm, torchvision or transformers takes."""
    config = getattr(model, "config", None)
    timm = getattr(model, "pretrained_cfg", None) or {}
    named = [getattr(config, "in_channels", None), getattr(config, "num_channels", None)]
    named += [getattr(model, "in_chans", None), (timm.get("input_size") or (3,))[0]]
    # EfficientNet of transformers keeps those of its blocks under this name.
    channels = next(value for value in named if isinstance(value, int) and value)
    found = (
        reduce(lambda value, name: getattr(value, name, None), path.split("."), model) for path in _SIZES
    )
    size: Any = next((value for value in found if value is not None), (timm.get("input_size") or (None,))[-1])
    if size is None:
        raise FathomsError(
            f"{type(model).__name__}: its image size is not known; pass images=, or the inputs that it takes"
        )
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return channels, int(height), int(width)


def example_images(model: nn.Module, batch: int, seed: int = 0) -> Tensor:
    """Random images of a model's image size, in its dtype and on its device."""
    home = next((p for p in model.parameters()), torch.empty(0))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *image_shape(model), generator=generator).to(home.device, home.dtype)


def example_inputs(model: nn.Module, batch: int, seed: int = 0) -> Inputs:
    """Random inputs of a model: images, or the token ids of a model of transformers that takes those."""
    config, taken = getattr(model, "config", None), inspect.signature(model.forward).parameters
    words = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if "input_ids" not in taken or not isinstance(words, int):
        return example_images(model, batch, seed)
    home = next(model.parameters()).device
    ids = torch.randint(words, (batch, 8), generator=torch.Generator().manual_seed(seed)).to(home)
    given: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        given["decoder_input_ids"] = ids
    if "pixel_values" in taken:
        given["pixel_values"] = example_images(model, batch, seed)
    return given


def output_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, each.name) for each in fields(output)]
    listed = output if isinstance(output, tuple | list) else ()
    return [tensor for value in listed for tensor in output_tensors(value)]


def call(model: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """The output tensors of a model on its inputs."""
    given, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return output_tensors(model(*((given,) if isinstance(given, Tensor) else given), **named))


@torch.no_grad()
def run(model: nn.Module, images: Inputs) -> list[Tensor]:
    """The output tensors of a model in inference, whatever mode it is in."""
    with in_inference(model):
        return [tensor.clone() for tensor in call(model, images)]


def finite_run(model: nn.Module, images: Inputs, where: str) -> list[Tensor]:
    """The output tensors of a model; one that is not finite is refused, since nothing could be compared with it."""
    found = run(model, images)
    if not found:
        raise FathomsError(
            f"{where}: the model returns no floating-point tensors that could be compared; wrap it in one that does"
        )
    if not all(tensor.isfinite().all() for tensor in found):
        raise FathomsError(f"{where}: the model's output is not finite; check its weights and the images")
    return found


def check_comparable(model: nn.Module, images: Inputs, where: str, allowed: float, otherwise: str) -> None:
    """Refuse images that a model does not take, and a model whose output no other can be compared with.

    That is one whose output is not finite, or changes by more than `allowed` from run to run, of its largest value.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise FathomsError(
            f"{where}: the model is on the meta device and computes nothing; load its weights first"
        )
    try:
        first = finite_run(model, images, where)
    except (FathomsError, torch.OutOfMemoryError):
        raise
    except REFUSALS as error:
        word = "calibrate=" if where == "swap_norms" else "images="
        raise FathomsError(
            f"{where}: the model fails on images of shape {shapes_of(images)} ({reason(error)}); give its inputs as "
            f"{word}, several as a tuple or a dict"
        ) from error
    second = run(model, images)
    same = [tensor.shape for tensor in first] == [tensor.shape for tensor in second]
    gap = difference(first, second) if same else float("inf")
    if not gap <= allowed:
        raise FathomsError(
            f"{where}: the model is not deterministic: two runs on the same images differ by {gap:.2g} of the largest "
            f"output; switch off what is random, such as masks, or {otherwise}"
        )


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference over the largest value, over all tensors of two outputs."""
    if len(before) != len(after) or any(a.shape != b.shape for a, b in zip(before, after, strict=True)):
        raise FathomsError(
            "difference: the two outputs have different shapes; compare models of the same outputs"
        )
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.numel():
            gap = (a.double() - b.double()).abs().max()
            ratio = float(gap / a.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny))
            # A NaN is not larger than anything, and must not pass for a small number.
            worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def zero_parameters(*models: nn.Module) -> list[str]:
    """Names of the parameters that multiply and are all zero in every model."""
    found = [dict(model.named_parameters()) for model in models]
    return [
        name
        for name in found[0]
        if name.rpartition(".")[2] not in _ADDED
        and all(name in own and own[name].numel() and not own[name].any() for own in found)
    ]


@contextmanager
def zeros_at_random(*models: nn.Module) -> Iterator[list[str]]:
    """Random values, the same in every model, for what is zero in all, inside the block; after it zero again."""
    generator, names = torch.Generator().manual_seed(0), zero_parameters(*models)
    with torch.no_grad():
        for name in names:
            own = [model.get_parameter(name) for model in models]
            # A matrix is divided by the root of its fan-in, as at any other start.
            scale = own[0].shape[-1] ** -0.5 if own[0].ndim > 1 else 1.0
            values = scale * torch.randn(own[0].shape, generator=generator)
            for parameter in own:
                parameter.copy_(values)
    try:
        yield names
    finally:
        with torch.no_grad():
            for parameter in (model.get_parameter(name) for name in names for model in models):
                parameter.zero_()


def depends_on_images(model: nn.Module, images: Inputs) -> bool:
    """Whether a model's output is another one for other images."""

    def moved(x: Tensor) -> Tensor:
        alone = size_of(images) == 1 and x.is_floating_point()
        return x.flip(-1) - x if alone else x.roll(1, 0) if size_of(images) > 1 else x.flip(-1)

    other = mapped(images, moved)
    return any(not torch.equal(a, b) for a, b in zip(run(model, images), run(model, other), strict=True))


def proof_notes(names: list[str], model: nn.Module, images: Inputs) -> tuple[str, ...]:
    """Notes on a comparison: the parameters that were zero, and whether it proved anything."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    zeros = f"{', '.join(names[:_SHOWN])}{more}"
    said = [f"zero, and so compared at random values too: {zeros}"] if names else []
    if not depends_on_images(model, images):
        said.append(
            "the comparison proved nothing: the output is the same for every image; load trained weights first"
        )
    return tuple(said)
