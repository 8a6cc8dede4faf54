"""Policies by the names of timm: `rand-m9-mstd0.5-inc1`, AutoAugment's `v0` and `original`, `3a`; and colour jitter.

A policy lists operations with probabilities and magnitudes; `draw_layers` turns sample keys into choices.
Magnitudes run from 0 to 10; `LEVELS` says what a magnitude means for each operation.

`v0` is AutoAugment's policy of the TPU EfficientNet code; an `r` at the end takes the posterize of the research code,
whose strength grows with the magnitude; `3a` is one operation instead of two.

Papers: AutoAugment, Cubuk et al. 2018, arXiv:1805.09501; RandAugment, Cubuk et al. 2019, arXiv:1909.13719; DeiT III
(3-Augment), arXiv:2204.07118.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fathoms.data.counter_rng import normals, uniforms
from fathoms.errors import ConfigError
from fathoms.registry import check_name

Entry = tuple[str, float, float]

_V0 = """
Equalize 0.8 1, ShearY 0.8 4
Color 0.4 9, Equalize 0.6 3
Color 0.4 1, Rotate 0.6 8
Solarize 0.8 3, Equalize 0.4 7
Solarize 0.4 2, Solarize 0.6 2
Color 0.2 0, Equalize 0.8 8
Equalize 0.4 8, SolarizeAdd 0.8 3
ShearX 0.2 9, Rotate 0.6 8
Color 0.6 1, Equalize 1.0 2
Invert 0.4 9, Rotate 0.6 0
Equalize 1.0 9, ShearY 0.6 3
Color 0.4 7, Equalize 0.6 0
Posterize 0.4 6, AutoContrast 0.4 7
Solarize 0.6 8, Color 0.6 9
Solarize 0.2 4, Rotate 0.8 9
Rotate 1.0 7, TranslateYRel 0.8 9
ShearX 0.0 0, Solarize 0.8 4
ShearY 0.8 0, Color 0.6 4
Color 1.0 0, Rotate 0.6 2
Equalize 0.8 4, Equalize 0.0 8
Equalize 1.0 4, AutoContrast 0.6 2
ShearY 0.4 7, SolarizeAdd 0.6 7
Posterize 0.8 2, Solarize 0.6 10
Solarize 0.6 8, Equalize 0.6 1
Color 0.8 6, Rotate 0.4 5
"""
_ORIGINAL = """
Posterize 0.4 8, Rotate 0.6 9
Solarize 0.6 5, AutoContrast 0.6 5
Equalize 0.8 8, Equalize 0.6 3
Posterize 0.6 7, Posterize 0.6 6
Equalize 0.4 7, Solarize 0.2 4
Equalize 0.4 4, Rotate 0.8 8
Solarize 0.6 3, Equalize 0.6 7
Posterize 0.8 5, Equalize 1.0 2
Rotate 0.2 3, Solarize 0.6 8
Equalize 0.6 8, Posterize 0.4 6
Rotate 0.8 8, Color 0.4 0
Rotate 0.4 9, Equalize 0.6 2
Equalize 0.0 7, Equalize 0.8 8
Invert 0.6 4, Equalize 1.0 8
Color 0.6 4, Contrast 1.0 8
Rotate 0.8 8, Color 1.0 2
Color 0.8 8, Solarize 0.8 7
Sharpness 0.4 7, Invert 0.6 8
ShearX 0.6 5, Equalize 1.0 9
Color 0.4 0, Equalize 0.6 3
Equalize 0.4 7, Solarize 0.2 4
Solarize 0.6 5, AutoContrast 0.6 5
Invert 0.6 4, Equalize 1.0 8
Color 0.6 4, Contrast 1.0 8
Equalize 0.8 8, Equalize 0.6 3
"""
_PAIRS_3A = """
Solarize 1.0 5
Desaturate 1.0 10
GaussianBlurRand 1.0 10
"""


def _read(text: str, posterize: str = "Posterize") -> tuple[tuple[Entry, ...], ...]:
    """Parse a table; `posterize` is the variant of that operation that the policy uses."""

    def entry(part: str) -> Entry:
        name, prob, magnitude = part.split()
        return posterize if name == "Posterize" else name, float(prob), float(magnitude)

    return tuple(tuple(entry(part) for part in line.split(",")) for line in text.strip().splitlines())


PAIRS = {
    "v0": _read(_V0),
    "v0r": _read(_V0, "PosterizeIncreasing"),
    "original": _read(_ORIGINAL, "PosterizeOriginal"),
    "originalr": _read(_ORIGINAL, "PosterizeIncreasing"),
    "3a": _read(_PAIRS_3A),
}


_STANDARD = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateXRel",
    "TranslateYRel",
)
# With `inc1` these are replaced by variants that grow stronger with the magnitude.
_GROWING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_INCREASING = tuple(f"{name}Increasing" if name in _GROWING else name for name in _STANDARD)
_THREE = ("SolarizeIncreasing", "Desaturate", "GaussianBlur")
_WEIGHTED: dict[str, dict[str, float]] = {
    "weights": {"Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1}
    | dict.fromkeys(("ColorIncreasing", "SharpnessIncreasing", "AutoContrast"), 0.25)
    | dict.fromkeys(("SolarizeIncreasing", "SolarizeAdd", "ContrastIncreasing", "BrightnessIncreasing"), 0.05)
    | dict.fromkeys(("Equalize", "PosterizeIncreasing", "Invert"), 0.05),
    "3aw": dict.fromkeys(_THREE, 6.0)
    | {"Rotate": 3.0, "ShearX": 2.0, "ShearY": 2.0}
    | dict.fromkeys(("PosterizeIncreasing", "AutoContrast", "ColorIncreasing", "SharpnessIncreasing"), 1.0)
    | dict.fromkeys(("ContrastIncreasing", "BrightnessIncreasing", "Equalize", "Invert"), 1.0),
}


@dataclass(frozen=True)
class Operation:
    """An operation of a policy, and its strength at a magnitude.

    `vary` is what is drawn: nothing, a sign, a sign about one, or a value from 0.1 up.
    """

    kind: str
    level: Callable[[np.ndarray], np.ndarray] = np.zeros_like
    vary: str = "nothing"

    def argument(self, magnitude: np.ndarray, toss: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """The argument of the operation, from magnitudes in 0..10 and two uniform draws."""
        value = self.level(magnitude / 10)
        sign = np.where(toss < 0.5, -1.0, 1.0)
        if self.vary == "sign":
            return sign * value
        if self.vary == "about one":
            return np.maximum(0.1, 1 + sign * value)
        return 0.1 + draw * (value - 0.1) if self.vary == "from 0.1" else value


def _bits(m: np.ndarray) -> np.ndarray:
    return np.trunc(m * 4)


def _threshold(m: np.ndarray) -> np.ndarray:
    return np.minimum(256, np.trunc(m * 256))


def _up_to(reach: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda m: m * reach


LEVELS: dict[str, Operation] = {
    "AutoContrast": Operation("auto_contrast"),
    "Equalize": Operation("equalize"),
    "Invert": Operation("invert"),
    "Rotate": Operation("rotate", _up_to(30.0), "sign"),
    "Posterize": Operation("posterize", _bits),
    "PosterizeIncreasing": Operation("posterize", lambda m: 4 - _bits(m)),
    "PosterizeOriginal": Operation("posterize", lambda m: _bits(m) + 4),
    "Solarize": Operation("solarize", _threshold),
    "SolarizeIncreasing": Operation("solarize", lambda m: 256 - _threshold(m)),
    "SolarizeAdd": Operation("solarize_add", lambda m: np.minimum(128, np.trunc(m * 110))),
    "ShearX": Operation("shear_x", _up_to(0.3), "sign"),
    "ShearY": Operation("shear_y", _up_to(0.3), "sign"),
    "TranslateXRel": Operation("translate_x", _up_to(0.45), "sign"),
    "TranslateYRel": Operation("translate_y", _up_to(0.45), "sign"),
    "Desaturate": Operation("colour", lambda m: 1 - np.clip(0.5 + 0.5 * m, 0.5, 1)),
    "GaussianBlur": Operation("gaussian_blur", lambda m: np.clip(0.1 + 1.9 * m, 0.1, 2)),
    "GaussianBlurRand": Operation("gaussian_blur", lambda m: 2 * np.clip(m, 0, 1), "from 0.1"),
}
for _name in ("Color", "Contrast", "Brightness", "Sharpness"):
    _kind = "colour" if _name == "Color" else _name.lower()
    LEVELS[_name] = Operation(_kind, lambda m: m * 1.8 + 0.1)
    LEVELS[f"{_name}Increasing"] = Operation(_kind, _up_to(0.9), "about one")

# Draws of one layer: choice, applied or not, two for the magnitude, sign, filter, extra.
_DRAWS = 7


@dataclass(frozen=True)
class Policy:
    """The operations of each layer, and how one of them is chosen for a sample."""

    layers: tuple[tuple[Entry, ...], ...]
    """Per layer the operations to choose from, each with its probability and magnitude."""
    choice: str = "apart"
    """apart: each layer draws its own entry; together: one draw picks a row across all layers."""
    weights: tuple[float, ...] | None = None
    """Unequal probabilities, for layers that draw apart; no operation is then drawn twice."""
    spread: float = 0.0
    """Standard deviation of the magnitude; infinite means uniform between 0 and the magnitude."""
    limit: float = 10.0
    """Largest magnitude."""


@dataclass(frozen=True)
class Layer:
    """One layer of operations on a batch: the rows of each kind of operation, and per row its arguments.

    `argument` is the operation's strength, `cubic` the filter of a geometric one; rows in no group are left
    unchanged.
    """

    rows: dict[str, np.ndarray]
    argument: np.ndarray
    cubic: np.ndarray


def parse_policy(text: str) -> Policy:
    """Read `rand-m7-n2-p0.5-mstd0.5-mmax10-inc1-tNAME`, or one of `PAIRS` with or without `-mstd0.5`."""
    head, *parts = text.split("-")
    if head == "augmix":
        raise ConfigError(f"--aa {text!r}: AugMix is not built in; use rand-m9-mstd0.5-inc1, v0 or 3a")
    check_name(head, ("rand", *PAIRS), "augmentation policy", "--aa")
    return _parse_rand(text, parts) if head == "rand" else _parse_pairs(text, head, parts)


def _parse_pairs(text: str, head: str, parts: list[str]) -> Policy:
    if len(parts) > 1 or any(not re.fullmatch(r"mstd\d+(\.\d+)?", part) for part in parts):
        raise ConfigError(f"--aa {text!r}: {head!r} takes only mstd; leave the rest out")
    spread = float(parts[0][4:]) if parts else 0.0
    return Policy(tuple(zip(*PAIRS[head], strict=True)), "together", spread=spread)


def _parse_rand(text: str, parts: list[str]) -> Policy:
    values = {"m": 10.0, "n": 2.0, "p": 0.5, "mstd": 0.0, "mmax": 10.0, "inc": 0.0}
    chosen = None
    for part in parts:
        if part.startswith("t"):
            chosen = check_name(part[1:], ("weights", "3a", "3aw"), "set of operations", f"--aa {text!r}")
            continue
        found = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?|inf)", part)
        if not found:
            raise ConfigError(f"--aa {text!r}: {part!r} is not an option; write rand-m9-mstd0.5-inc1")
        values[check_name(found[1], values, "RandAugment option", f"--aa {text!r}")] = float(found[2])
    weights = None
    if chosen in _WEIGHTED:
        ops, weights = tuple(_WEIGHTED[chosen]), tuple(float(w) for w in _WEIGHTED[chosen].values())
    elif chosen == "3a":
        ops = _THREE
    else:
        ops = _INCREASING if values["inc"] else _STANDARD
    if values["mmax"] <= 0 or not 0 <= values["p"] <= 1 or not 1 <= values["n"] <= len(ops):
        raise ConfigError(
            f"--aa {text!r}: is out of range; mmax is positive, p is 0 to 1 and n is 1 to {len(ops)}"
        )
    layer = tuple((name, values["p"], values["m"]) for name in ops)
    spread = math.inf if values["mstd"] > 100 else values["mstd"]
    return Policy((layer,) * int(values["n"]), "apart", weights, spread, values["mmax"])


def _choices(policy: Policy, draws: np.ndarray) -> np.ndarray:
    """Index of the entry that each sample gets in each layer, (B, layers), from one draw for each."""
    count = len(policy.layers[0])
    if policy.choice == "together":
        draws = np.broadcast_to(draws[:, :1], draws.shape)
    if policy.weights is None:
        return np.minimum((draws * count).astype(np.int64), count - 1)
    weights = np.tile(np.array(policy.weights), (len(draws), 1))
    picked = []
    for layer in range(len(policy.layers)):
        edges = weights.cumsum(1) / weights.sum(1, keepdims=True)
        choice = np.minimum((draws[:, layer, None] >= edges).sum(1), count - 1)
        weights[np.arange(len(draws)), choice] = 0
        picked.append(choice)
    return np.stack(picked, 1)


def draw_layers(policy: Policy, keys: np.ndarray, interpolation: str = "random") -> list[Layer]:
    firsts = [number * _DRAWS for number in range(len(policy.layers))]
    pairs = np.stack([uniforms(keys, 2, first) for first in firsts], 1)
    choices = _choices(policy, pairs[..., 0])
    layers = []
    for number, entries in enumerate(policy.layers):
        prob, centre = np.array([entry[1:] for entry in entries])[choices[:, number]].T
        used = np.flatnonzero(pairs[:, number, 1] < prob)
        # Most of the time of a draw is its hash, and samples without an operation need no further draws.
        first, second, sign, filters, extra = uniforms(keys[used], _DRAWS - 2, firsts[number] + 2).T
        choice = choices[used, number]
        centre = centre[used]
        # An infinite spread means uniform between 0 and the magnitude.
        uniform = math.isinf(policy.spread)
        magnitude = centre * first if uniform else centre + policy.spread * normals(first, second)
        magnitude = np.clip(magnitude, 0, policy.limit)
        argument, cubic = np.zeros(len(keys)), np.full(len(keys), interpolation == "bicubic")
        if interpolation == "random":
            cubic[used] = filters < 0.5
        groups: dict[str, list[np.ndarray]] = {}
        for place in np.unique(choice).tolist():
            own = np.flatnonzero(choice == place)
            rows = used[own]
            operation = LEVELS[entries[place][0]]
            argument[rows] = operation.argument(magnitude[own], sign[own], extra[own])
            groups.setdefault(operation.kind, []).append(rows)
        layers.append(Layer({kind: np.concatenate(rows) for kind, rows in groups.items()}, argument, cubic))
    return layers


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


def jitters_beside(aa: str | None) -> bool:
    """Whether colour jitter is applied beside a policy: without one, or with a `3a`, as in timm."""
    return aa is None or "3a" in aa


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
