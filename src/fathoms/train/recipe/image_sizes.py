"""Progressive image size: small training images first, the model's own size at the end."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from fathoms.errors import ConfigError


@dataclass(frozen=True)
class ImageSizes:
    """Side of the training images by epoch, from text such as "0:128,100:160,200:224".

    Each part is the first epoch of a size, counted from 0. The last size must be the model's own, so that training
    ends at the size of evaluation.

    >>> sizes = ImageSizes("0:128,100:224", final=224, patch_size=16, epochs=300)
    >>> sizes.at(99), sizes.at(100)
    (128, 224)
    """

    text: str | None
    final: int
    patch_size: int
    epochs: int

    def __post_init__(self) -> None:
        if self.text is None:
            return
        starts = [start for start, _ in self.stages]
        where = f"--progressive-size {self.text}"
        if starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ConfigError(f"{where}: epochs must increase from 0")
        if starts[-1] >= self.epochs:
            raise ConfigError(
                f"{where}: epoch {starts[-1]} is beyond the {self.epochs} epochs of this run; start earlier"
            )
        for _, size in self.stages:
            if size < 1 or size % self.patch_size:
                raise ConfigError(f"{where}: {size} is not a multiple of the patch size {self.patch_size}")
        if self.stages[-1][1] != self.final:
            raise ConfigError(
                f"{where}: ends at {self.stages[-1][1]}, but the model's image size is {self.final}; end with that, or "
                f"give --image-size {self.stages[-1][1]}"
            )

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Pairs of first epoch and size, in order."""
        parts = (self.text or f"0:{self.final}").split(",")
        found = [re.fullmatch(r"\s*(\d{1,7}):(\d{1,5})\s*", part, re.ASCII) for part in parts]
        if not all(found):
            raise ConfigError(
                f"--progressive-size {self.text}: write EPOCH:SIZE, such as 0:128,100:160,200:224"
            )
        return [(int(match[1]), int(match[2])) for match in found if match]

    def at(self, epoch: int) -> int:
        """The image size of an epoch."""
        return [size for start, size in self.stages if start <= epoch][-1]
