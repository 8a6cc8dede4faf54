"""Inputs and outputs of any model.

Its inputs are one tensor, a tuple of the arguments of its forward, or a dict of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fathoms.errors import FathomsError
from fathoms.parts.modes import in_inference

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]

# What the code of another library may raise on inputs that it does not take.
REFUSALS = (FathomsError, ArithmeticError, AssertionError, AttributeError, LookupError)
REFUSALS += (RuntimeError, TypeError, ValueError)

# Where libraries keep the image size of a model; the first that is found counts.
_SIZES = ("config.image_size", "config.vision_config.image_size", "patch_embed.img_size", "stem.img_size")
_SIZES += ("image_size", "img_size")


def check_model(model: Any, where: str) -> None:
    """Refuse what is not a model, such as its name or its weights, and one whose modules cannot be changed."""
    if isinstance(model, torch.jit.ScriptModule):
        why = "a scripted model cannot be changed; give it as it was before torch.jit"
    elif isinstance(model, nn.Module):
        lazy = [name for name, tensor in model.named_parameters() if is_lazy(tensor)]
        if not lazy:
            return
        why = f"{lazy[0]} has no shape yet; run the model once first"
    else:
        what = repr(model) if isinstance(model, str | type) else f"a {type(model).__name__}"
        why = f"{what} is not a model; give an nn.Module that is built, as by fathoms.create_model or timm"
    raise FathomsError(f"{where}: {why}")


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, dict):
        return dict(zip(inputs, mapped(tuple(inputs.values()), change), strict=True))
    return tuple(change(value) if isinstance(value, Tensor) else value for value in inputs)


def tensors(inputs: Inputs) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(inputs, lambda tensor: found.append(tensor) or tensor)
    return found


def size_of(inputs: Inputs) -> int:
    return len(tensors(inputs)[0])


def shapes_of(inputs: Inputs) -> str:
    """The shapes of inputs, as errors name them."""
    return ", ".join(str(tuple(value.shape)) for value in tensors(inputs))


def dtype_of(inputs: Inputs, model: nn.Module) -> torch.dtype:
    """The dtype that sets how far a model rounds: the coarsest of its weights and inputs."""
    found = {t.dtype for t in (*tensors(inputs), *model.parameters()) if t.is_floating_point()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def exactly(inputs: Inputs) -> Inputs:
    return mapped(inputs, lambda t: t.double() if t.is_floating_point() else t)


def with_size(inputs: Inputs, count: int) -> Inputs:
    """So many samples of a batch, from its start again where it has fewer."""
    size = size_of(inputs)
    places = [place % size for place in range(count)]
    return mapped(inputs, lambda value: value[places] if value.ndim and len(value) == size else value)


def resized(inputs: Inputs) -> Iterator[Inputs]:
    """Inputs of other sizes, made of the same values: images, maps, sequences; a model need not take them.

    Token ids only become fewer: more of them may be out of a table's range, which a GPU does not survive.
    """
    like = tensors(inputs)[0]
    for axes in {2: [(1,)], 3: [(1,), (2,)], 4: [(2, 3), (1, 2)], 5: [(3, 4), (2,)]}.get(like.ndim, []):
        sizes = [like.shape[axis] for axis in axes]
        # The usual patches are 4, 8, 14, 16 and 32 pixels wide; windows are of some patches.
        steps = (4, 8, 14, -16, 32, -min(sizes) // 2) if min(sizes) >= 32 else (1, 2, -1, -min(sizes) // 2)
        for step in steps if like.is_floating_point() else (-1, -3):
            # A single channel would be broadcast by a scale of many.
            if min(sizes) + step >= 2:
                yield mapped(inputs, partial(_resized, axes=axes, sizes=sizes, step=step))


def _resized(value: Tensor, axes: tuple[int, ...], sizes: list[int], step: int) -> Tensor:
    if value.ndim <= max(axes) or [value.shape[axis] for axis in axes] != sizes:
        return value
    for axis, size in zip(axes, sizes, strict=True):
        value = value.index_select(axis, torch.arange(size + step, device=value.device) % size)
    return value


def as_inputs(given: Any, model: nn.Module) -> Inputs:
    """One batch as `images=` takes it: a tensor, a tuple of arguments or a dict, where the model's weights are."""
    inputs = dict(given) if isinstance(given, Mapping) else tuple(given) if isinstance(given, list) else given
    if not isinstance(inputs, Tensor | tuple | dict) or not tensors(inputs):
        name = type(given).__name__
        raise FathomsError(f"batches: a {name} is not a batch; give a tensor, or a tuple or dict of them")
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
    taken = inspect.signature(model.forward).parameters.values()
    needed = [
        p for p in taken if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    batches = []
    for batch in listed:
        if isinstance(batch, tuple | list):
            # Of (images, labels) a model takes the images; one of two inputs takes both.
            batch = tuple(batch[: max(1, len(needed))])
            batch = batch[0] if len(batch) == 1 else batch
        batches.append(as_inputs(batch, model))
    if not batches:
        raise FathomsError("batches: there are none; give at least one batch of images")
    return batches


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
        name = type(model).__name__
        raise FathomsError(f"{name}: its image size is not known; pass images=, or the inputs that it takes")
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return channels, int(height), int(width)


def example_images(model: nn.Module, batch: int, seed: int = 0) -> Tensor:
    """Random images of a model's image size, in its dtype and on its device."""
    home = next(model.parameters(), torch.empty(0))
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


def known_inputs(model: nn.Module) -> Inputs | None:
    """Random inputs of a model that says what it takes; None for others, and for one without memory."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    try:
        return example_inputs(model, 2)
    except FathomsError:
        return None


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


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference over the largest value, over all tensors of two outputs."""
    if [a.shape for a in before] != [b.shape for b in after]:
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
