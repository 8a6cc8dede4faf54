"""Randomise all-zero parameters while outputs are compared, since they hide what they multiply.

A classifier or a branch that starts at zero hides whatever it multiplies: two different models then agree. Such
parameters get random values for the length of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fathoms.surgery.inputs import run

# Parameters that are added: at zero they hide nothing.
_ADDED = ("bias", "beta", "shift", "b")
_SHOWN = 3


def zero_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that multiply and are all zero."""
    return [
        name
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] not in _ADDED and parameter.numel() and not parameter.any()
    ]


@contextmanager
def zeros_at_random(names: list[str], *models: nn.Module) -> Iterator[None]:
    """Random values, the same in every model, for these parameters inside the block; after it they are zero again."""
    generator = torch.Generator().manual_seed(0)
    found = [dict(model.named_parameters()) for model in models]
    with torch.no_grad():
        for name in names:
            values = torch.randn(found[0][name].shape, generator=generator)
            for parameters in found:
                # A matrix is divided by the root of its fan-in, as at any other start.
                scale = values.shape[-1] ** -0.5 if values.ndim > 1 else 1.0
                parameters[name].copy_(scale * values)
    try:
        yield
    finally:
        with torch.no_grad():
            for name in names:
                for parameters in found:
                    parameters[name].zero_()


def depends_on_images(model: nn.Module, images: Tensor) -> bool:
    """Whether a model's output is another one for other images."""
    other = images.roll(1, 0) if len(images) > 1 else images.flip(-1) - images
    return any(not torch.equal(a, b) for a, b in zip(run(model, images), run(model, other), strict=True))


def proof_notes(names: list[str], proved: bool) -> tuple[str, ...]:
    """Notes of a report on its comparison: the parameters that were zero, and whether it proved anything."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    zeros = f"{', '.join(names[:_SHOWN])}{more}"
    said = [f"zero, and so compared at random values too: {zeros}"] if names else []
    if not proved:
        said.append(
            "the comparison proved nothing: the output is the same for every image; load trained weights first"
        )
    return tuple(said)
