"""The verdict on drift: what a run's measurements over time are heading for, before it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fathoms.probes.verdicts.advice import Config, against_logits
from fathoms.probes.verdicts.start import Finding, Verdict, place
from fathoms.probes.verdicts.thresholds import THRESHOLDS, Thresholds

Row = dict[str, Any]
FEWEST = 4
"""Measurements below which no trend is reported."""


def drift_verdict(rows: Sequence[Row], config: Config = None) -> Verdict | None:
    """The trend over the second half of a run's probe.jsonl; None where there are too few measurements."""
    rows = [row for row in rows if isinstance(row.get("sites"), list) and row["sites"]]
    if len(rows) < FEWEST:
        return None
    found = []
    for kind, name, pick, limit, words, helps in _watched(THRESHOLDS, config):
        series = [
            (row.get("step", 0), pick([s for s in row["sites"] if s.get(name) is not None], name))
            for row in rows
        ]
        points = [(float(step), value) for step, value in series if value is not None]
        finding = (
            _trend(kind, points, limit, words, helps, THRESHOLDS.drift) if len(points) >= FEWEST else None
        )
        found += [] if finding is None else [finding]
    found += _gamma(rows) + _updates(rows[-1], THRESHOLDS)
    return Verdict("drifts" if any(finding.bad for finding in found) else "steady", found)


def _watched(
    limits: Thresholds, config: Config
) -> list[tuple[str, str, Callable[..., Any], float, str, str]]:
    """Watched quantities: kind, column, which site, limit, words, what helps. A limit below zero is a lower one."""
    alike = ("tokens grow alike", "drop path, registers, or a residual scale")
    collapse = ("attention entropy collapses", _both(against_logits(config), "a lower --lr"))
    logits = ("attention logits grow", _both(against_logits(config), "weight decay on q and k"))
    values = ("activations grow", "a norm, or bfloat16 instead of float16")
    return [
        ("tokens alike", "token_cosine", _highest, 0.95, *alike),
        ("entropy collapses", "entropy", _lowest, -limits.entropy, *collapse),
        ("logits grow", "logit", _highest, limits.logit, *logits),
        (
            "curve saturates",
            "saturated",
            _highest,
            limits.saturated,
            "DyT saturates",
            "a smaller --norm-init",
        ),
        ("units die", "dead", _highest, limits.dead, "hidden units die", "a lower --lr"),
        ("values grow", "largest", _highest, limits.float16, *values),
    ]


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}, or {second}"


def _highest(sites: Sequence[Row], name: str) -> tuple[float, Row] | None:
    return max(((site[name], site) for site in sites), key=lambda pair: pair[0], default=None)


def _lowest(sites: Sequence[Row], name: str) -> tuple[float, Row] | None:
    return min(((site[name], site) for site in sites), key=lambda pair: pair[0], default=None)


def _trend(
    kind: str,
    points: Sequence[tuple[float, tuple[float, Row]]],
    limit: float,
    words: str,
    helps: str,
    least: float,
) -> Finding | None:
    """A finding where the number is beyond its limit, or moves to it within as many updates as were made so far."""
    upper, bound = limit > 0, abs(limit)
    half = points[len(points) // 2 :]
    steps, values = [step for step, _ in half], [value for _, (value, _) in half]
    slope = float(np.polyfit(steps, values, 1)[0]) if steps[-1] > steps[0] else 0.0
    now, site = points[-1][1]
    start = points[0][1][0]
    beyond = now > bound if upper else now < bound
    ahead = now + slope * steps[-1]
    heading = (ahead > bound if upper else ahead < bound) and abs(now - start) > least * abs(bound - start)
    if not beyond and not heading:
        return None
    left = (
        ""
        if beyond or not slope
        else f", {bound:.3g} in {abs((bound - now) / slope):.0f} updates at this pace"
    )
    text = f"{words}: {start:.3g} at the start, {now:.3g} at update {points[-1][0]:g} ({place(site)}){left}"
    return Finding(kind, True, text, helps)


def _gamma(rows: Sequence[Row]) -> list[Finding]:
    """Branches whose learned scale stayed below a tenth of its former size for the second half of the run.

    One measurement would not do: a scale of one number passes through zero when it changes its sign.
    """
    sizes: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for site in row["sites"]:
            if site.get("gamma_mean") is not None:
                sizes.setdefault((site["block"], site["branch"]), []).append(site["gamma_mean"])
    dying = [
        where
        for where, found in sizes.items()
        if max(found[len(found) // 2 :]) < max(found[: len(found) // 2]) / 10
    ]
    if not dying:
        return []
    text = f"the scale of {len(dying)} of {len(sizes)} branches has shrunk tenfold, first at {' '.join(dying[0])}"
    return [Finding("gamma dies", True, text, "no weight decay on the scales; fewer blocks may do as well")]


def _updates(row: Row, limits: Thresholds) -> list[Finding]:
    """The last update over the weights, the median of the branches."""
    values = [site["update"] for site in row["sites"] if site.get("update") is not None]
    if not values:
        return []
    middle = float(np.median(values))
    if limits.update_low <= middle <= limits.update_high:
        return []
    side, helps = ("small", "a higher --lr") if middle < limits.update_low else ("large", "a lower --lr")
    return [Finding("update size", True, f"updates are {side}: {middle:.2g} of the weights", helps)]
