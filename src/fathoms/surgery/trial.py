"""A change of a model on trial: modules exchanged, outputs compared, and all as it was if something fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError, reason
from fathoms.parts.modes import hooked
from fathoms.surgery.inputs import REFUSALS, Inputs, difference, mapped, run, shapes_of, size_of

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
        return asdict(self)


def home_of(module: nn.Module) -> dict[str, torch.device | torch.dtype]:
    """Device and dtype of a module's parameters, or nothing where it has none."""
    tensor = next(module.parameters(), None)
    return {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace `old` by `new` everywhere in `model`; a shared module stays shared."""
    for parent in list(model.modules()):
        for name in [name for name, child in parent._modules.items() if child is old]:
            parent._modules[name] = new
        if isinstance(parent, nn.TransformerEncoderLayer):
            _choose_path(parent)
        # What it uses without having it, as the joins of a block use a scale that they share.
        for name in [name for name, value in vars(parent).items() if value is old]:
            object.__setattr__(parent, name, new)


def _choose_path(layer: nn.TransformerEncoderLayer) -> None:
    """Switch torch's fused inference, which reads the weights of two LayerNorms, off where there are none, else on."""
    norms = (layer.norm1, layer.norm2)
    fused = all(isinstance(norm, nn.LayerNorm) and norm.weight is not None for norm in norms)
    kinds = ((nn.functional.relu, nn.ReLU), (nn.functional.gelu, nn.GELU))
    own = [n for n, (f, c) in enumerate(kinds, 1) if layer.activation is f or isinstance(layer.activation, c)]
    # The fused path alone reads this.
    layer.activation_relu_or_gelu = own[0] if fused and own else 0


@contextmanager
def exchanged(model: nn.Module, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Replace the first of each pair by the second; undone if that or the block raises."""
    try:
        for old, new in pairs:
            replace_module(model, old, new)
        yield
    except BaseException:
        for old, new in pairs:
            replace_module(model, new, old)
        raise


def watch(model: nn.Module, inputs: Inputs, see: Mapping[nn.Module, Callable[..., object]]) -> None:
    """Run a model once in inference; each of these modules shows the arguments of its calls: see(args, kwargs)."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        see[module](args, kwargs)

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in see]
    # What is compiled calls no hooks.
    with hooked(*handles), torch.compiler.set_stance("force_eager"):
        run(model, inputs)


def check_comparable(model: nn.Module, images: Inputs, where: str, allowed: float, otherwise: str) -> None:
    """Refuse images that a model does not take, and a model whose output no other can be compared with.

    That is one whose output is not finite, or changes by more than `allowed` from run to run, of its largest value.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        why = "the model is on the meta device and computes nothing; load its weights first"
        raise FathomsError(f"{where}: {why}")
    try:
        first, second = run(model, images), run(model, images)
    except (FathomsError, torch.OutOfMemoryError):
        raise
    except REFUSALS as error:
        word = "calibrate=" if where == "swap_norms" else "images="
        why = f"the model fails on images of shape {shapes_of(images)} ({reason(error)})"
        raise FathomsError(
            f"{where}: {why}; give its inputs as {word}, several as a tuple or a dict"
        ) from error
    if not first:
        why = "the model returns no floating-point tensors that could be compared; wrap it in one that does"
        raise FathomsError(f"{where}: {why}")
    if not all(tensor.isfinite().all() for tensor in first):
        raise FathomsError(f"{where}: the model's output is not finite; check its weights and the images")
    same = [tensor.shape for tensor in first] == [tensor.shape for tensor in second]
    gap = difference(first, second) if same else float("inf")
    if not gap <= allowed:
        raise FathomsError(
            f"{where}: the model is not deterministic: two runs on the same images differ by {gap:.2g} of the largest "
            f"output; switch off what is random, such as masks, or {otherwise}"
        )


def zero_parameters(*models: nn.Module) -> list[str]:
    """Names of the parameters that multiply and are all zero in every model."""
    first, *others = [dict(model.named_parameters()) for model in models]

    def is_zero(name: str) -> bool:
        return all(name in own and own[name].numel() and not own[name].any() for own in (first, *others))

    return [name for name in first if name.rpartition(".")[2] not in _ADDED and is_zero(name)]


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


def proof_notes(zeros: list[str], model: nn.Module, images: Inputs) -> tuple[str, ...]:
    """Notes on a comparison: the parameters that were zero, and that it proved nothing if no image matters."""
    more = f" and {len(zeros) - _SHOWN} more" if len(zeros) > _SHOWN else ""
    said = [f"zero, and so compared at random values too: {', '.join(zeros[:_SHOWN])}{more}"] if zeros else []

    def moved(x: Tensor) -> Tensor:
        if size_of(images) > 1:
            return x.roll(1, 0)
        return x.flip(-1) - x if x.is_floating_point() else x.flip(-1)

    if difference(run(model, images), run(model, mapped(images, moved))) == 0.0:
        said.append(
            "the comparison proved nothing: the output is the same for every image; load trained weights first"
        )
    return tuple(said)
