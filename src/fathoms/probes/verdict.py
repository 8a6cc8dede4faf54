"""Verdicts in words: does this model train at this learning rate, and is a run heading for failure?

The verdict on a start is what real optimizer steps show. Numbers of the depth stand beside it and explain it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fathoms.probes.thresholds import LIMITS, QUIET, THRESHOLDS, Config, Limit, depth_features, helps
from fathoms.text_table import as_html, plural

Row = dict[str, Any]
Sites = Sequence[Row]

LAST = 10
"""Losses at the end that a start is judged by; fewer steps are not judged."""
FEWEST = 4
"""Measurements below which no trend is reported."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Args:
        kind: Its name, such as "gradient explodes".
        text: The sentence, with the number it rests on.
        helps: What usually helps.
    """

    kind: str
    text: str
    helps: str


SAYS = {"trains": "expected to train", "diverges": "expected to DIVERGE", "not judged": "not judged"}


@dataclass(frozen=True)
class Verdict:
    """What is expected, and what the numbers of the depth say beside it; printed, it is a sentence each.

    Args:
        outcome: Of a start "trains", "diverges" or "not judged"; of a run "steady" or "drifts".
        findings: What was found; in a run they are the reasons.
        basis: What a start was judged by.
    """

    outcome: str
    findings: list[Finding] = field(default_factory=list)
    basis: str = ""

    def __str__(self) -> str:
        name = f"Start: {SAYS[self.outcome]}" if self.outcome in SAYS else f"Drift: {self.outcome}"
        lines = [f"  - {finding.text}; usual help: {finding.helps}" for finding in self.findings]
        return "\n".join([f"{name} ({self.basis})" if self.basis else name, *lines])

    def _repr_html_(self) -> str:
        return as_html(*str(self).partition("\n")[::2])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def outcome_of(losses: Sequence[float], guess: float) -> str:
    """What the first losses of a training say: "trains", "diverges" or "not judged".

    The mean of the last ten is below the loss of a guess, or above it and the first loss; two of its standard errors
    make the difference. No threshold was fitted to runs.

    Args:
        losses: Before each update.
        guess: The loss of a model that knows the shares of the classes and nothing of the images.

    >>> outcome_of([2.3, *[2.2] * 10], 2.3), outcome_of([2.3, *[2.4] * 10], 2.3), outcome_of([2.3] * 11, 2.3)
    ('trains', 'diverges', 'not judged')
    """
    if not all(map(math.isfinite, losses)):
        return "diverges"
    last = losses[-LAST:]
    if len(last) < LAST:
        return "not judged"
    mean, reach = statistics.fmean(last), 2 * statistics.stdev(last) / math.sqrt(LAST)
    if mean + reach < guess:
        return "trains"
    return "diverges" if mean - reach > max(guess, losses[0]) else "not judged"


def not_judged(sites: Sites, config: Config) -> Verdict:
    """The numbers of an initialisation, which decide nothing."""
    found = _of_depth(sites, config) + site_findings(sites, config)
    return Verdict("not judged", found, "from the initialisation alone, which misleads")


def judged(
    first: Sites, later: Sites | None, config: Config, losses: Sequence[float], guess: float, optimizer: str
) -> Verdict:
    """The verdict on a start, from the losses of its first steps.

    Args:
        first: The sites before the steps.
        later: Those after them; None where the weights did not stay finite.
        config: Of the model, for the advice.
        losses: Before each step.
        guess: The loss of a guess by the shares of the classes.
        optimizer: Its name and rate, in words.
    """
    count, found = plural(len(losses), "step"), _of_depth(first, config)
    begun, ended = (
        f"{loss:.3g}" if math.isfinite(loss) else "not finite" for loss in (losses[0], losses[-1])
    )
    basis = f"{optimizer}, {count}, loss {begun} -> {ended}, a guess has {guess:.3g}"
    if later is None:
        return Verdict("diverges", found, basis)
    return Verdict(outcome_of(losses, guess), found + site_findings(later, config, f"after {count} "), basis)


def _of_depth(sites: Sites, config: Config) -> list[Finding]:
    """Findings on gradient and stream over the depth, at initialisation."""
    features, found = depth_features(sites), list[Finding]()
    factor, power = features["gradient_factor"], features["growth_power"]
    if features["gradient_last"] == 0:
        text = "no gradient reaches the blocks before the first update: the classifier is zero"
        found.append(Finding("no gradient yet", text, "nothing to do; the steps are what counts"))
    # Two blocks of a shallow stack differ by more.
    elif factor is not None and (features["blocks"] or 0) >= THRESHOLDS.fewest_blocks:
        words = f"by x{factor:.3g} per block towards the first block"
        if factor > THRESHOLDS.gradient_factor:
            advice = helps(("norm", "scale", "a lower --lr"), config)
            found.append(Finding("gradient explodes", f"the gradient explodes {words}", advice))
        elif factor < THRESHOLDS.vanish_factor:
            advice = helps(("norm", "fewer blocks"), config)
            found.append(Finding("gradient vanishes", f"the gradient vanishes {words}", advice))
    if power is not None and power > THRESHOLDS.growth_power:
        advice = helps(("scale", "fewer blocks"), config)
        found.append(Finding("stream grows", f"the stream grows like depth^{power:.2g}", advice))
    return found


def site_findings(sites: Sites, config: Config, when: str = "") -> list[Finding]:
    """Findings on single branches: for each limit the branch that is furthest beyond it.

    Args:
        sites: Those of `Signal.to_json`.
        config: Of the model, for the advice.
        when: Words in front, such as "after 50 steps ".
    """
    found = _silent(sites, config, when)
    for limit in LIMITS:
        beyond = [
            site for site in sites if (value := site.get(limit.column)) is not None and limit.passed(value)
        ]
        if beyond:
            worst = max(beyond, key=lambda site, limit=limit: limit.sign * site[limit.column])
            # Rounding leaves the entropy of one token a little below zero.
            text = limit.text.format(place=place(worst), value=max(0.0, worst[limit.column]))
            found.append(Finding(limit.kind, when + text, helps(limit.helps, config)))
    return found


def _silent(sites: Sites, config: Config, when: str) -> list[Finding]:
    """Branches that add next to nothing although no residual scale intends it."""
    ratios = [site["ratio"] for site in sites if site.get("ratio") is not None]
    quiet = [ratio for ratio in ratios if ratio < THRESHOLDS.silent_ratio]
    meant = config is not None and config["residual"] in QUIET
    if not quiet or meant or any(site.get("gamma_mean") is not None for site in sites):
        return []
    count = f"{len(quiet)} of {len(sites)} branches {'is' if len(quiet) == 1 else 'are'} silent"
    text = f"{when}{count} (branch/stream {min(quiet):.2g}), and no residual scale is the reason"
    return [Finding("silent branches", text, helps(("norm", "a larger initialisation"), config))]


def place(site: Row) -> str:
    return f"{site['block']} {site['branch']}"


def drift_verdict(rows: Sequence[Row], config: Config = None) -> Verdict | None:
    """The trend over the second half of a run's probe.jsonl; None where there are too few measurements."""
    rows = [row for row in rows if isinstance(row.get("sites"), list) and row["sites"]]
    if len(rows) < FEWEST:
        return None
    found = []
    for limit in (limit for limit in LIMITS if limit.trend):
        points = []
        for row in rows:
            sites = [site for site in row["sites"] if site.get(limit.column) is not None]
            if sites:
                worst = max(sites, key=lambda site, limit=limit: limit.sign * site[limit.column])
                points.append((float(row.get("step", 0)), worst))
        if len(points) >= FEWEST:
            found += _trend(limit, points, config)
    found += _gamma(rows) + _updates(rows[-1])
    return Verdict("drifts" if found else "steady", found)


def _trend(limit: Limit, points: Sequence[tuple[float, Row]], config: Config) -> list[Finding]:
    """A finding where the number is beyond its limit, or moves to it within as many updates as were made so far."""
    steps = [step for step, _ in points]
    values = [float(site[limit.column]) for _, site in points]
    half = slice(len(points) // 2, None)
    slope = float(np.polyfit(steps[half], values[half], 1)[0]) if steps[-1] > steps[half][0] else 0.0
    start, now = values[0], values[-1]
    moved = abs(now - start) > THRESHOLDS.drift * abs(limit.bound - start)
    if not limit.passed(now) and not (moved and limit.passed(now + slope * steps[-1])):
        return []
    left = (
        "" if limit.passed(now) else f", {limit.bound:.3g} in {abs((limit.bound - now) / slope):.0f} updates"
    )
    pace = f"{left} at this pace" if left else ""
    text = f"{limit.trend}: {start:.3g} at the start, {now:.3g} at update {steps[-1]:g} ({place(points[-1][1])}){pace}"
    return [Finding(limit.kind, text, helps(limit.helps, config))]


def _gamma(rows: Sequence[Row]) -> list[Finding]:
    """Branches whose learned scale stayed below a tenth of its former size for the second half of the run.

    One measurement would not do: a scale of one number passes through zero when it changes its sign.
    """
    sizes: dict[str, list[float]] = {}
    for row in rows:
        for site in row["sites"]:
            if site.get("gamma_mean") is not None:
                sizes.setdefault(place(site), []).append(site["gamma_mean"])
    halves = {name: (own[: len(own) // 2], own[len(own) // 2 :]) for name, own in sizes.items()}
    dying = [name for name, (early, late) in halves.items() if max(late) < max(early, default=0.0) / 10]
    if not dying:
        return []
    text = f"the scale of {len(dying)} of {len(sizes)} branches has shrunk tenfold, first at {dying[0]}"
    return [Finding("gamma dies", text, "no weight decay on the scales; fewer blocks may do as well")]


def _updates(row: Row) -> list[Finding]:
    """The last update over the weights, the median of the branches."""
    values = [site["update"] for site in row["sites"] if site.get("update") is not None]
    middle = statistics.median(values) if values else THRESHOLDS.update_low
    if THRESHOLDS.update_low <= middle <= THRESHOLDS.update_high:
        return []
    side, advice = ("small", "a higher --lr") if middle < THRESHOLDS.update_low else ("large", "a lower --lr")
    return [Finding("update size", f"updates are {side}: {middle:.2g} of the weights", advice)]
