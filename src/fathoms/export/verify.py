"""Verify an exported model against the original, at batch sizes other than the one it was exported with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.surgery.inputs import difference, example_images, run

BATCHES = (1, 5)

# Another runtime sums in another order; a larger share of the largest output is not rounding.
TOLERANCE = 1e-4


def verify(model: nn.Module, exported: Callable[[Tensor], list[Tensor]], what: str) -> dict[int, float]:
    """The largest difference over the largest output, by batch size; above the tolerance it is an error."""
    gaps = {}
    for batch in BATCHES:
        images = example_images(model, batch, seed=batch)
        gaps[batch] = difference(run(model, images), exported(images))
    worst = max(gaps.values())
    if not worst <= TOLERANCE:
        raise FathomsError(
            f"export: the {what} differs by {worst:.2g} of the largest output, more than {TOLERANCE:g}; "
            "nothing was written, please report this model"
        )
    return gaps
