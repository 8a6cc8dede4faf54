"""The few numbers of a probe that the verdict on the start of training rests on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fathoms.files.strict_json import finite
from fathoms.probes.blocks import main_stack
from fathoms.probes.signal import Signal

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
    if after is None:
        return features
    later = depth_features(after.to_json()["sites"])
    features |= {f"after_{name}": value for name, value in later.items()}
    for name in ("stream_max", "ratio_median", "logit", "gradient_last"):
        features[f"{name}_rise"] = _over(later[name], features[name])
    features["after_loss"] = finite(after.loss)
    if losses:
        known = all(math.isfinite(loss) for loss in losses)
        features["loss_rise"] = finite(max(losses[1:], default=losses[0]) - losses[0]) if known else None
        features["loss_end"] = finite(losses[-1] - losses[0]) if known else None
        features["nonfinite"] = float(not finite)
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
