"""Numbers that the probe's verdicts rest on, their thresholds, and what usually helps beyond one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fathoms.files import finite
from fathoms.probes.blocks import main_stack

if TYPE_CHECKING:
    from fathoms.probes.coordinates import FirstSteps
    from fathoms.probes.signal import Signal

FLAT_SLOPE = 0.5
"""Coordinate check: bound of d log rise / d log size that the interval of a flat slope may not pass. CompleteP's
authors call 0 right; wrong parametrisations of a ViT measured 0.7 and more."""


@dataclass(frozen=True)
class Thresholds:
    """Limits of one number each; a finding is made where the number is beyond its limit.

    `loss_rise` decides whether a start diverges, as the calibration set it. Beyond the other first limits a start is
    not judged: what they foretold came true in 47 % (`token_cosine`, `branch_ratio`), or was not measured
    (the gradient's). The rest make findings that are told beside the verdict.
    """

    gradient_factor: float = 1.35
    """Gradient explodes: growth of the gradient per block towards the first, a mean without its extremes."""
    vanish_factor: float = 0.75
    """Gradient vanishes: the same below this."""
    fewest_blocks: int = 6
    """Both, and `branch_ratio`, count from this many blocks: a healthy shallower model passes them."""
    fewest_images: int = 8
    """The first steps are judged from this many images per batch: the loss of fewer differs too much by chance."""
    loss_rise: float = 0.24
    """Diverges: rise of the loss over ten steps, in nats."""
    token_cosine: float = 0.975
    """Tokens are alike: mean cosine between two tokens after the last block, after ten steps."""
    branch_ratio: float = 0.6
    """The stream is overwritten: largest branch over stream after ten steps."""
    stream_rise: float = 30.0
    """The stream rises: growth of the largest stream over ten steps. Models that train well do this too."""
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

CALIBRATED_STEPS = 10
CALIBRATED_OPTIMIZER = "adamw"
PRECISION = {"trains": 0.91, "diverges": 0.91}
"""Share of each verdict of the start that came true, in the half of the calibration that set no threshold.

It holds for the steps and the optimizer above, and for the data and the depths below."""
CALIBRATED = "CIFAR-10 at 24 and 48 blocks"
CALIBRATED_ON = ((3, 32, 32), 10)
"""Shape of its images, and its classes."""
CALIBRATED_BLOCKS = range(24, 49)
A_GUESS = 0.01
"""Nats below ln(classes) from which a loss says that more than the number of classes was learnt."""


def is_calibrated(steps: FirstSteps, depth: int) -> bool:
    """Whether first steps are like those of the calibration: number, optimizer, images, classes and depth."""
    taken = (steps.steps, steps.opt, (steps.seen, steps.classes))
    return taken == (CALIBRATED_STEPS, CALIBRATED_OPTIMIZER, CALIBRATED_ON) and depth in CALIBRATED_BLOCKS


Config = Mapping[str, Any] | None
"""Fields of ViTConfig; None for a model that is not fathoms' own, which takes none of its flags."""

SCALED = ("layerscale", "rezero", "rezero_shared", "skipinit")
"""Values of --residual with a learned scale, small unless --residual-init says otherwise."""
QUIET = (*SCALED, "fixup", "prores")
"""Values of --residual whose branches may add nothing at first."""
_PRE = ("pre", "pre_post", "keel")
_LARGE = 0.1


def against_explosion(config: Config) -> str:
    """A gradient that explodes."""
    return _joined(_norm(config), _scale(config)) or "a lower --lr, or fewer blocks"


def against_vanishing(config: Config) -> str:
    """A gradient that vanishes."""
    post = config is not None and "post" in _placements(config)
    deepnorm = "--residual deepnorm" if post and config["residual"] == "none" else None
    return _joined(_norm(config), deepnorm) or "fewer blocks"


def against_divergence(config: Config) -> str:
    """A loss or a stream that rises."""
    return _joined("a lower --lr", "a warm-up", _scale(config))


def against_stalling(config: Config) -> str:
    """Tokens that become alike, a stream that is overwritten."""
    return _joined("a lower --lr", _norm(config), _scale(config))


def against_growth(config: Config) -> str:
    """A stream that grows fast with depth."""
    placed = config is not None and "pre_post" in _placements(config)
    return _joined(_scale(config), None if placed else "pre_post norms") or "fewer blocks"


def against_logits(config: Config) -> str:
    """Attention logits out of range."""
    if config is None:
        return "a norm on queries and keys"
    return "--qk-norm rmsnorm" if config["qk_norm"] == "none" else "a lower --lr"


def against_silence(config: Config) -> str:
    """Branches that add nothing, although no scale says so."""
    return _joined(_norm(config), "a larger initialisation")


def _placements(config: Mapping[str, Any]) -> tuple[str, str]:
    return config["attn_placement"], config["mlp_placement"]


def _norm(config: Config) -> str | None:
    if config is None:
        return "a norm before each branch"
    if config["norm"] == "none":
        return "--norm layernorm"
    if all(placement in _PRE for placement in _placements(config)):
        return None
    return "pre-norm (--attn-placement pre --mlp-placement pre)"


def _scale(config: Config) -> str | None:
    if config is None:
        return "a residual scale that starts small"
    if config["residual"] in SCALED:
        return "a smaller --residual-init" if (config["residual_init"] or 0.0) >= _LARGE else None
    if config["residual"] != "none" or "keel" in _placements(config):
        return None
    return "a residual scale that starts small (--residual layerscale)"


def _joined(*pieces: str | None) -> str:
    """The pieces there are, as a list of alternatives."""
    found = [piece for piece in pieces if piece is not None]
    if len(found) < 3:
        return ", or ".join(found)
    return f"{', '.join(found[:-1])}, or {found[-1]}"


Features = dict[str, float | None]


def depth_features(sites: Sequence[dict[str, Any]]) -> Features:
    """One model at one moment, of its longest stack of blocks; `sites` are those of `Signal.to_json`."""
    stack = main_stack([str(site["block"]) for site in sites])
    sites = [_unenlarged(site) for site in sites if site["block"] in stack]
    streams, gradients = _column(sites, "stream"), _column(sites, "gradient")
    by_block = {site["block"]: site.get("gradient") for site in sites}
    return {
        "blocks": float(len(by_block)),
        "growth": _over(streams[-1], streams[0]),
        "growth_power": _power(streams),
        "gradient_factor": _factor(list(by_block.values())),
        "gradient_last": gradients[-1],
        "ratio_median": _of(np.median, sites, "ratio"),
        "ratio_min": _of(min, sites, "ratio"),
        "ratio_max": _of(max, sites, "ratio"),
        "weights_spread": _spread(_column(sites, "weights_rms")),
        "stream_max": _of(max, sites, "stream"),
        "largest": _of(max, sites, "largest"),
        "logit": _of(max, sites, "logit"),
        "entropy": _of(min, sites, "entropy"),
        "entropy_mean": _of(np.mean, sites, "entropy"),
        "token_cosine": _last(sites, "token_cosine"),
        "token_mean": _last(sites, "token_mean"),
        "saturated": _of(max, sites, "saturated"),
        "dead": _of(max, sites, "dead"),
    }


def start_features(initial: Signal, after: Signal | None = None, losses: Sequence[float] = ()) -> Features:
    """At initialisation; after a few steps too, with the prefix `after_`, and how far those have moved it."""
    features = depth_features(initial.to_json()["sites"])
    features |= {"loss": finite(initial.loss), "logits": finite(initial.logits)}
    if losses:
        known = all(math.isfinite(loss) for loss in losses)
        features["loss_rise"] = finite(max(losses[1:], default=losses[0]) - losses[0]) if known else None
        features["loss_end"] = finite(losses[-1] - losses[0]) if known else None
        # Steps after which there is nothing to measure have destroyed the weights.
        features["nonfinite"] = float(not known or after is None)
    if after is None:
        return features
    later = depth_features(after.to_json()["sites"])
    features |= {f"after_{name}": value for name, value in later.items()}
    for name in ("stream_max", "ratio_median", "logit", "gradient_last"):
        features[f"{name}_rise"] = _over(later[name], features[name])
    features["after_loss"] = finite(after.loss)
    return features


def _unenlarged(site: dict[str, Any]) -> dict[str, Any]:
    """A site whose ratio leaves out the skip's factor, as the calibration of the thresholds measured it."""
    return site | {"ratio": _over(site["added"], site["stream"])} if "added" in site else site


def _column(sites: Sequence[dict[str, Any]], name: str) -> list[float | None]:
    return [site.get(name) for site in sites]


def _of(summary: Any, sites: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [value for value in _column(sites, name) if value is not None]
    return float(summary(values)) if values else None


def _last(sites: Sequence[dict[str, Any]], name: str) -> float | None:
    """At the last site that has it; class attention at the end has one token, and so no cosine."""
    return next((value for value in reversed(_column(sites, name)) if value is not None), None)


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _factor(gradients: Sequence[float | None]) -> float | None:
    """The factor per block towards the first one: the geometric mean over pairs of neighbours, its extremes left out.

    One jump, such as keel's at its first branch, is not a growth that goes on; a tenth of the pairs at either end, at
    least one, is left out where three or more are there.
    """
    pairs = itertools.pairwise(gradients)
    logs = sorted(math.log(early / late) for early, late in pairs if early and late)
    cut = max(1, len(logs) // 10) if len(logs) > 2 else 0
    return math.exp(float(np.mean(logs[cut : len(logs) - cut]))) if logs else None


def _power(streams: Sequence[float | None]) -> float | None:
    """The power p of stream ~ depth^p, fitted over the second half of the sites, where the stem no longer counts."""
    half = [(place + 1, value) for place, value in enumerate(streams) if value and place >= len(streams) // 2]
    if len(half) < 2:
        return None
    places, values = zip(*half, strict=True)
    return float(np.polyfit(np.log(places), np.log(values), 1)[0])


def _spread(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value]
    return max(found) / min(found) if found else None
