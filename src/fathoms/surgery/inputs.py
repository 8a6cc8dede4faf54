"""Inputs and outputs of any model as tensors, and the difference between two outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError, reason
from fathoms.models.inference_mode import in_inference

# Where libraries keep the image size of a model; the first that is found counts.
_SIZES = (
    ("config", "image_size"),
    ("patch_embed", "img_size"),
    ("image_size",),
    ("img_size",),
)


def home_of(module: nn.Module) -> dict[str, torch.device | torch.dtype]:
    """Device and dtype of a module's parameters, or nothing where it has none."""
    tensor = next(module.parameters(), None)
    return {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}


def check_model(model: Any, where: str) -> None:
    """Refuse what is not a model, such as its name or its weights."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise FathomsError(f"{where}: {model.__name__} is a class; give a model that is built")
    if isinstance(model, str):
        raise FathomsError(
            f"{where}: {model!r} is a name; build the model first, with fathoms.create_model or timm"
        )
    raise FathomsError(
        f"{where}: a {type(model).__name__} is not a model; give an nn.Module with its weights loaded"
    )


def as_batches(given: Any, model: nn.Module) -> list[Tensor]:
    """The images of one tensor, or of an iterable of tensors or (images, labels), where the model's weights are."""
    listed = [given] if isinstance(given, Tensor) else given
    if not isinstance(listed, Iterable):
        raise FathomsError(f"batches: a {type(given).__name__} is not a batch of images; give tensors")
    home = next((p for p in model.parameters()), torch.empty(0))
    batches = []
    for batch in listed:
        images = batch[0] if isinstance(batch, tuple | list) else batch
        images = next(iter(images.values())) if isinstance(images, Mapping) else images
        if not isinstance(images, Tensor):
            raise FathomsError(
                f"batches: {type(images).__name__} is not a batch of images; give tensors or (images, labels)"
            )
        if not images.numel():
            raise FathomsError(
                f"batches: one of shape {tuple(images.shape)} holds no images; give at least one"
            )
        if not images.isfinite().all():
            raise FathomsError("batches: an image holds values that are not finite; leave it out")
        batches.append(images.to(home.device, home.dtype if images.is_floating_point() else images.dtype))
    if not batches:
        raise FathomsError("batches: there are none; give at least one batch of images")
    return batches


def _found(model: nn.Module, path: tuple[str, ...]) -> Any:
    value: Any = model
    for name in path:
        value = getattr(value, name, None)
    return value


def image_shape(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model of fathoms, timm, torchvision or transformers takes."""
    config = getattr(model, "config", None)
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", None)
    timm = getattr(model, "pretrained_cfg", None) or {}
    channels = channels or getattr(model, "in_chans", None) or (timm.get("input_size") or (3,))[0]
    size = next((value for path in _SIZES if (value := _found(model, path)) is not None), None)
    size = size if size is not None else (timm.get("input_size") or (None,))[-1]
    if size is None:
        raise FathomsError(f"{type(model).__name__}: its image size is not known; pass images=")
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return int(channels), int(height), int(width)


def example_images(model: nn.Module, batch: int, seed: int = 0) -> Tensor:
    """Random images of a model's image size, in its dtype and on its device."""
    home = next((p for p in model.parameters()), torch.empty(0))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *image_shape(model), generator=generator).to(home.device, home.dtype)


def output_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in output_tensors(value)]
    if isinstance(output, tuple | list):
        return [tensor for value in output for tensor in output_tensors(value)]
    return []


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The output tensors of a model in inference, whatever mode it is in."""
    with in_inference(model):
        return [tensor.clone() for tensor in output_tensors(model(images))]


def finite_run(model: nn.Module, images: Tensor, where: str) -> list[Tensor]:
    """The output tensors of a model; one that is not finite is refused, since nothing could be compared with it."""
    found = run(model, images)
    if not all(tensor.isfinite().all() for tensor in found):
        raise FathomsError(f"{where}: the model's output is not finite; check its weights and the images")
    return found


def check_comparable(model: nn.Module, images: Tensor, where: str, allowed: float, otherwise: str) -> None:
    """Refuse images that a model does not take, and a model whose output no other can be compared with.

    That is one whose output is not finite, or changes by more than `allowed` from run to run, of its largest value.

    Args:
        model: Any module.
        images: A batch (B, ...).
        where: The caller, as errors name it.
        allowed: Largest difference that is rounding.
        otherwise: What can be done with a model that is random all the same.
    """
    try:
        first = finite_run(model, images, where)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        raise FathomsError(
            f"{where}: the model fails on images of shape {tuple(images.shape)} ({reason(error)}); "
            "give images as it takes them"
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
