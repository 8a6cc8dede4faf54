"""Colour jitter: brightness, contrast, saturation and hue, in an order drawn for each sample."""

from __future__ import annotations

import numpy as np

from fathoms.data.augment.policy import Layer
from fathoms.data.counter_rng import uniforms
from fathoms.errors import ConfigError

_KINDS = ("brightness", "contrast", "colour", "hue")


def jitter_ranges(strength: float | tuple[float, ...]) -> tuple[float, ...]:
    """Ranges of brightness, contrast, saturation and perhaps hue; one number stands for the first three."""
    ranges = (float(strength),) * 3 if isinstance(strength, int | float) else tuple(map(float, strength))
    if len(ranges) not in (3, 4) or min(ranges) < 0 or (len(ranges) == 4 and ranges[3] > 0.5):
        raise ConfigError(
            f"--color-jitter {strength!r}: is out of range; give one number, or three (four with hue, at most 0.5), "
            "none negative"
        )
    return ranges


def draw_jitter(ranges: tuple[float, ...], keys: np.ndarray) -> list[Layer]:
    """Draw one layer per range above zero; each sample gets each operation once."""
    used = [(kind, reach) for kind, reach in zip(_KINDS, ranges, strict=False) if reach > 0]
    if not used:
        return []
    count = len(used)
    draws = uniforms(keys, 2 * count)
    order = draws[:, :count].argsort(axis=1)
    low = np.array([-reach if kind == "hue" else max(0.0, 1 - reach) for kind, reach in used])
    high = np.array([reach if kind == "hue" else 1 + reach for kind, reach in used])
    factors = low + (high - low) * draws[:, count:]
    no_filter = np.zeros(len(keys), bool)
    everyone = np.arange(len(keys))
    layers = []
    for turn in range(count):
        choice = order[:, turn]
        rows = {kind: np.flatnonzero(choice == number) for number, (kind, _) in enumerate(used)}
        present = {kind: own for kind, own in rows.items() if len(own)}
        layers.append(Layer(present, factors[everyone, choice], no_filter))
    return layers
