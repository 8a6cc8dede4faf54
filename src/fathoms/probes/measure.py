"""One batch forward and backward through a model that is left as it was found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.errors import ConfigError, FathomsError, ShapeError, WeightsError, reason
from fathoms.models.vit import ViT
from fathoms.parts.modes import hooked, in_inference
from fathoms.probes.blocks import branch_parameters, find_blocks, scales_of, unwrap
from fathoms.probes.recorder import Recorder
from fathoms.probes.tensor_statistics import norm, rms, scale_statistics, update_norms


class Measured(NamedTuple):
    """One batch, measured.

    Args:
        sites: The numbers of every residual connection, by block and branch.
        loss: The loss.
        logits: Root mean square of the outputs.
        classes: Number of outputs.
        unseen: What was not seen, one sentence each.
        projection: Name and numbers of the layer that reads the pixels; None if there is none.
        config: Fields of ViTConfig; None for a model that is not fathoms' own.
    """

    sites: dict[tuple[str, str], dict[str, float]]
    loss: float
    logits: float
    classes: int
    unseen: tuple[str, ...]
    projection: dict[str, Any] | None
    config: dict[str, Any] | None


def measure(
    model: nn.Module, images: Tensor, labels: Tensor | None, optimizer: Optimizer | None, light: bool
) -> Measured:
    """Run a batch forward and backward, and read what the recorder saw."""
    model = unwrap(model)
    blocks = find_blocks(model)
    _check_finite(model)
    _check_batch(images, labels)
    recorder = Recorder(model, blocks, light)
    parameters = {id(p): p for p in model.parameters() if p.requires_grad}
    with _untouched(model, images.device), hooked(*recorder.install()):
        # The images ask for a gradient, so that one reaches every block of a frozen model too.
        given = (images.clone() if images.is_inference() else images).detach().requires_grad_()
        with recorder.tracer:
            logits = _run(model, given)
        recorder.stop()
        loss = _loss(logits, labels)
        wanted = [*parameters.values(), given]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    by_parameter: dict[int, Tensor | None] = dict(zip(parameters, gradients, strict=False))
    for (name, branch), values in recorder.sites.items():
        values |= _of_parameters(blocks[name], branch, by_parameter, optimizer, images.device)
        for missing in ("gradient", "gradient_rms"):
            values.setdefault(missing, torch.zeros((), device=images.device))
    if not recorder.sites:
        raise ConfigError(f"probe: no block of {type(model).__name__} ran; give a whole model")
    size, outputs = torch.stack([loss.detach().double(), rms(logits).double()]).tolist()
    projection = None
    if recorder.first_layer is not None:
        name, layer = recorder.first_layer
        values = _gradients(list(layer.parameters()), by_parameter, optimizer, images.device)
        projection = {
            "layer": name,
            **dict(zip(values, torch.stack([*values.values()]).tolist(), strict=True)),
        }
    config = model.config.to_dict() if isinstance(model, ViT) else None
    unseen = tuple(recorder.unseen)
    return Measured(recorder.read(), size, outputs, logits.shape[1], unseen, projection, config)


def _of_parameters(
    block: nn.Module,
    branch: str,
    gradients: dict[int, Tensor | None],
    optimizer: Optimizer | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Statistics of a branch's parameters: their gradient, their scales, and the next update."""
    side = branch.rstrip("0123456789")
    parameters = [parameter for _, parameter in branch_parameters(block, side)]
    values = _gradients(parameters, gradients, optimizer, device)
    gammas, norms = scales_of(block, side)
    for name, scales in (("gamma", gammas), ("norm", norms)):
        if scales:
            values |= scale_statistics(torch.cat([scale.flatten() for scale in scales]), name)
    return values


def _gradients(
    parameters: Sequence[nn.Parameter],
    gradients: dict[int, Tensor | None],
    optimizer: Optimizer | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Size of the gradient on some parameters, and of their next update where an optimizer has it."""
    own = [g for p in parameters if (g := gradients.get(id(p))) is not None]
    # Frozen parameters have no gradient: its norm is zero.
    total = _total([norm(g) for g in own] or [torch.zeros((), device=device)])
    count = sum(g.numel() for g in own)
    values = {"weights": total, "weights_rms": total / math.sqrt(max(count, 1))}
    steps = None if optimizer is None else update_norms(optimizer, parameters)
    if steps is not None:
        values["update"] = _total(steps) / _total([norm(p) for p in parameters])
    return values


def _total(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms).double())


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without noise of drop-path, torch's compiler off, random numbers put back at the end."""
    devices = [device] if device.type == "cuda" else []
    stance = torch.compiler.set_stance("force_eager")
    # A caller's torch.inference_mode() would leave nothing to take a gradient of.
    normal = torch.inference_mode(False)
    with normal, torch.random.fork_rng(devices), in_inference(model), torch.enable_grad(), stance:
        yield


def _run(model: nn.Module, images: Tensor) -> Tensor:
    """The model's logits, of whatever it returns."""
    try:
        output: Any = model(images)
    except FathomsError:
        raise
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"probe: {len(images)} images do not fit in memory; use a smaller batch") from error
    except (RuntimeError, ValueError, AssertionError, IndexError, TypeError) as error:
        if (kind := _other_kind(model, images)) is not None:
            raise ConfigError(
                f"probe: {type(model).__name__} is in {kind}, the images are {images.dtype}; give images.to({kind})"
            ) from error
        shape = "x".join(str(side) for side in images.shape[1:])
        raise ShapeError(
            f"probe: {type(model).__name__} cannot take images of {shape} ({reason(error)}); give images of its size"
        ) from error
    return logits_of(output, type(model).__name__)


def _other_kind(model: nn.Module, images: Tensor) -> torch.dtype | None:
    """The dtype of a model's weights, where it is not that of the images and no autocast makes up for it."""
    kinds = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if not kinds or images.dtype in kinds or torch.is_autocast_enabled(images.device.type):
        return None
    return kinds[0]


def logits_of(output: Any, name: str = "the model") -> Tensor:
    """The logits in what a model returns; of features without a head, their mean over the tokens."""
    for key in ("logits", "pooler_output", "last_hidden_state"):
        found = output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)
        output = output if found is None else found
    output = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise ConfigError(f"probe: {name} gives no logits; give a model with images in, logits out")
    return output.flatten(1, -2).mean(1) if output.dim() > 2 else output


def _loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    classes = logits.shape[1]
    if labels is None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(classes, (len(logits),), generator=generator)
    if len(labels) != len(logits):
        raise ShapeError(f"probe: {len(labels)} labels for {len(logits)} images; give one for each")
    if int(labels.max()) >= classes or int(labels.min()) < 0:
        raise ShapeError(
            f"probe: labels reach {int(labels.max())}, the model has {classes} outputs; give others"
        )
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    labels = labels.clone() if labels.is_inference() else labels
    return F.cross_entropy(logits.to(kind), labels.to(logits.device, torch.int64))


def _check_batch(images: Any, labels: Any) -> None:
    if not isinstance(images, Tensor):
        raise ConfigError(
            f"probe: images are a {type(images).__name__}; give a tensor, torch.as_tensor(images)"
        )
    if images.dim() != 4 or len(images) == 0:
        raise ShapeError(f"probe: images are {tuple(images.shape)}; give a batch (B, C, H, W) of one or more")
    if not images.is_floating_point():
        raise ConfigError(f"probe: images are {images.dtype}; give floats, normalised as in training")
    if labels is None:
        return
    if not isinstance(labels, Tensor):
        raise ConfigError(f"probe: labels are a {type(labels).__name__}; give a tensor of classes")
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        raise ConfigError(
            f"probe: labels are {labels.dtype} of shape {tuple(labels.shape)}; give one whole number for each image"
        )


def _check_finite(model: nn.Module) -> None:
    """Refuse weights that are not finite or that no gradient can be taken of, and name the first."""
    named = [(name, p.detach()) for name, p in model.named_parameters() if p.is_floating_point()]
    if not named:
        return
    if any(p.is_inference() for p in model.parameters()):
        raise WeightsError(
            "probe: the weights were made under torch.inference_mode(), without gradients; build it outside"
        )
    sizes = torch._foreach_norm([p for _, p in named], math.inf)
    bad = ~torch.isfinite(torch.stack([size.to(torch.float32) for size in sizes]))
    if bool(bad.any()):
        name = named[int(bad.nonzero()[0])][0]
        raise WeightsError(
            f"probe: {name} holds values that are not finite; the weights are lost, load earlier ones"
        )
