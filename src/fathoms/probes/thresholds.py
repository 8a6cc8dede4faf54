"""Numbers of a probe by depth, the limits beyond which they are told, and what usually helps beyond one."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fathoms.probes.blocks import main_stack

FLAT_SLOPE = 0.5
"""Coordinate check: bound of d log rise / d log size that the interval of a flat slope may not pass. CompleteP's
authors call 0 right; wrong parametrisations of a ViT measured 0.7 and more."""


@dataclass(frozen=True)
class Thresholds:
    """Limits of one number each. What is beyond one is told; none of them decides whether a start trains."""

    gradient_factor: float = 1.35
    """Gradient explodes: growth of the gradient per block towards the first, a mean without its extremes."""
    vanish_factor: float = 0.75
    """Gradient vanishes: the same below this."""
    fewest_blocks: int = 6
    """Both count from this many blocks: a healthy shallower model passes them."""
    token_cosine: float = 0.975
    """Tokens are alike: mean cosine between two tokens."""
    branch_ratio: float = 0.6
    """The stream is overwritten: branch over stream after the steps."""
    growth_power: float = 1.5
    """The stream grows like depth^p: p above this."""
    silent_ratio: float = 1e-3
    """A branch is silent: branch over stream below this."""
    float16: float = 65504.0
    """float16 would overflow: the largest value, of stream, branches, hidden units and attention logits."""
    entropy: float = 0.1
    """Attention is saturated: entropy over its maximum below this."""
    logit: float = 100.0
    """Attention logits are out of range: softmax in 16 bits has a resolution of half a unit there."""
    saturated: float = 0.5
    """DyT or Derf is saturated: share of values on its flat parts."""
    dead: float = 0.5
    """Dead units: share of hidden units without a slope."""
    update_low: float = 1e-5
    """Updates too small: next update over weights."""
    update_high: float = 3e-2
    """Updates too large: the same."""
    drift: float = 0.2
    """Share of its range that a number must move over the second half of a run to count as drifting."""


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Limit:
    """The limit of one column of a site.

    Args:
        column: Its name.
        bound: The limit.
        kind: Name of the finding.
        text: The sentence on a start, with {place} and {value}.
        helps: What usually helps, for `helps`.
        trend: Words of a run that moves towards it; "" where no trend is watched.
        sign: 1 for an upper limit, -1 for a lower one.
    """

    column: str
    bound: float
    kind: str
    text: str
    helps: tuple[str, ...]
    trend: str = ""
    sign: int = 1

    def passed(self, value: float) -> bool:
        return self.sign * value > self.sign * self.bound


LIMITS = (
    Limit(
        "token_cosine",
        THRESHOLDS.token_cosine,
        "tokens alike",
        "the tokens of an image are alike at {place} (mean cosine {value:.3g})",
        ("a lower --lr", "norm", "scale"),
        "tokens grow alike",
    ),
    Limit(
        "ratio",
        THRESHOLDS.branch_ratio,
        "stream overwritten",
        "a branch adds x{value:.3g} of the stream at {place}, and so overwrites it",
        ("a lower --lr", "norm", "scale"),
    ),
    Limit(
        "entropy",
        THRESHOLDS.entropy,
        "attention saturated",
        "attention is saturated at {place} (entropy {value:.2g} of its maximum)",
        ("qk", "a lower --lr"),
        "attention entropy collapses",
        -1,
    ),
    Limit(
        "logit",
        THRESHOLDS.logit,
        "attention logits",
        "attention logits reach {value:.3g} at {place}",
        ("qk", "a lower --lr"),
        "attention logits grow",
    ),
    Limit(
        "saturated",
        THRESHOLDS.saturated,
        "curve saturated",
        "{value:.0%} of the values are on the flat parts of the curve at {place}",
        ("a smaller --norm-init",),
        "DyT saturates",
    ),
    Limit(
        "dead",
        THRESHOLDS.dead,
        "dead units",
        "{value:.0%} of the hidden units are dead at {place}",
        ("a lower --lr",),
        "hidden units die",
    ),
    Limit(
        "largest",
        THRESHOLDS.float16,
        "float16 overflows",
        "float16 would overflow at {place} (largest value {value:.3g})",
        ("bfloat16", "a norm"),
        "activations grow",
    ),
)

Config = Mapping[str, Any] | None
"""Fields of ViTConfig; None for a model that is not fathoms' own, which takes none of its flags."""

_SCALED = ("layerscale", "rezero", "rezero_shared", "skipinit")
"""Values of --residual with a learned scale, small unless --residual-init says otherwise."""
QUIET = (*_SCALED, "fixup", "prores")
"""Values of --residual whose branches may add nothing at first."""
_PRE = ("pre", "pre_post", "keel")
_LARGE = 0.1
_FOREIGN = {
    "norm": "a norm before each branch",
    "scale": "a residual scale that starts small",
    "qk": "a norm on queries and keys",
}


def helps(remedies: Sequence[str], config: Config) -> str:
    """What usually helps: remedies in words, or named "norm", "scale" and "qk", without those that the model has."""
    missing = _FOREIGN if config is None else _missing(config)
    words = [missing.get(remedy, "") if remedy in _FOREIGN else remedy for remedy in remedies]
    return ", or ".join(filter(None, words)) or "a lower --lr"


def _missing(config: Mapping[str, Any]) -> dict[str, str]:
    """The remedies that a model does not have, as flags."""
    placements, found = (config["attn_placement"], config["mlp_placement"]), dict[str, str]()
    if config["norm"] == "none":
        found["norm"] = "--norm layernorm"
    elif any(placement not in _PRE for placement in placements):
        found["norm"] = "pre-norm (--attn-placement pre --mlp-placement pre)"
    if config["residual"] in _SCALED and (config["residual_init"] or 0.0) >= _LARGE:
        found["scale"] = "a smaller --residual-init"
    elif config["residual"] == "none" and "keel" not in placements:
        found["scale"] = "a residual scale that starts small (--residual layerscale)"
    if config["qk_norm"] == "none":
        found["qk"] = "--qk-norm rmsnorm"
    return found


Features = dict[str, float | None]


def depth_features(sites: Sequence[dict[str, Any]]) -> Features:
    """One model at one moment, of its longest stack of blocks; `sites` are those of `Signal.to_json`."""
    stack = main_stack([str(site["block"]) for site in sites])
    sites = [site for site in sites if site["block"] in stack]
    columns = {
        name: [site[name] for site in sites if site.get(name) is not None]
        for name in (
            "stream",
            "gradient",
            "ratio",
            "weights_rms",
            "largest",
            "logit",
            "entropy",
            "token_cosine",
        )
    }
    by_block = {site["block"]: site.get("gradient") for site in sites}
    streams, weights = columns["stream"], [value for value in columns["weights_rms"] if value]
    return {
        "blocks": float(len(by_block)),
        "growth": streams[-1] / streams[0] if streams and streams[0] else None,
        "growth_power": _power(streams),
        "gradient_factor": _factor(list(by_block.values())),
        "gradient_last": next(iter(columns["gradient"][::-1]), None),
        "ratio_median": statistics.median(columns["ratio"]) if columns["ratio"] else None,
        "weights_spread": max(weights) / min(weights) if weights else None,
        "stream_max": max(streams, default=None),
        "largest": max(columns["largest"], default=None),
        "logit": max(columns["logit"], default=None),
        "entropy_mean": statistics.fmean(columns["entropy"]) if columns["entropy"] else None,
        # Class attention at the end has one token, and so no cosine.
        "token_cosine": next(iter(columns["token_cosine"][::-1]), None),
    }


def _factor(gradients: Sequence[float | None]) -> float | None:
    """The factor per block towards the first one: the geometric mean over pairs of neighbours, its extremes left out.

    One jump, such as keel's at its first branch, is not a growth that goes on; a tenth of the pairs at either end, at
    least one, is left out where three or more are there.
    """
    pairs = itertools.pairwise(gradients)
    logs = sorted(math.log(early / late) for early, late in pairs if early and late)
    cut = max(1, len(logs) // 10) if len(logs) > 2 else 0
    return math.exp(statistics.fmean(logs[cut : len(logs) - cut])) if logs else None


def _power(streams: Sequence[float]) -> float | None:
    """The power p of stream ~ depth^p, fitted over the second half of the sites, where the stem no longer counts."""
    half = [(place, value) for place, value in enumerate(streams, 1) if value and place > len(streams) // 2]
    if len(half) < 2:
        return None
    places, values = zip(*half, strict=True)
    return float(np.polyfit(np.log(places), np.log(values), 1)[0])
