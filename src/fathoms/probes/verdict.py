"""Verdicts in words: will this model train at this learning rate, and is a run heading for failure?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fathoms.probes.thresholds import (
    A_GUESS,
    CALIBRATED,
    CALIBRATED_STEPS,
    PRECISION,
    QUIET,
    THRESHOLDS,
    Config,
    Features,
    Thresholds,
    against_divergence,
    against_explosion,
    against_growth,
    against_logits,
    against_silence,
    against_stalling,
    against_vanishing,
    is_calibrated,
    start_features,
)
from fathoms.text_table import as_html, plural

if TYPE_CHECKING:
    from fathoms.probes.coordinates import FirstSteps
    from fathoms.probes.signal import Signal

Sites = Sequence[dict[str, Any]]

OF_DEPTH = ("gradient_factor", "after_ratio_max")
"""Numbers whose limits have no meaning for a shallow stack, whose branches are all as large as the stream."""
OF_STEPS = ("loss_rise", "after_token_cosine", "after_ratio_max", "stream_max_rise")
"""Numbers of the first steps that have no meaning where their batches hold too few images."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Args:
        kind: Its name, such as "gradient explodes".
        bad: Whether it decides the verdict; otherwise it is reported separately.
        text: The sentence, with the number it rests on.
        helps: What usually helps.
    """

    kind: str
    bad: bool
    text: str
    helps: str


SAYS = {"trains": "expected to train", "diverges": "expected to DIVERGE", "not judged": "not judged"}


@dataclass(frozen=True)
class Verdict:
    """What is expected, with its reasons; printed, it is a sentence each.

    Args:
        outcome: Of a start "trains", "diverges" or "not judged"; of a run "steady" or "drifts".
        calibrated: Whether the calibration measured how often it comes true.
        findings: The reasons.
        basis: What a start was judged by.
        came_true: Share of such verdicts that came true; None where that was not measured.
    """

    outcome: str
    calibrated: bool = False
    findings: list[Finding] = field(default_factory=list)
    basis: str = ""
    came_true: float | None = None

    def __str__(self) -> str:
        told = f"; {self.came_true or 0:.0%} of such verdicts came true on {CALIBRATED}"
        share = "" if self.came_true is None else told
        basis = f" ({self.basis}{share})" if self.basis else ""
        name = f"Start: {SAYS[self.outcome]}" if self.outcome in SAYS else f"Drift: {self.outcome}"
        lines = [f"  - {finding.text}; usual help: {finding.helps}" for finding in self.findings]
        return "\n".join([name + basis, *lines])

    def _repr_html_(self) -> str:
        return as_html(*str(self).partition("\n")[::2])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        findings = [asdict(finding) for finding in self.findings]
        return {
            "outcome": self.outcome,
            "findings": findings,
            "basis": self.basis,
            "came_true": self.came_true,
        }


@dataclass(frozen=True)
class Basis:
    """The basis of a verdict: steps, batch and model of the probe.

    Args:
        steps: Optimizer steps that were taken.
        images: Images in each of their batches; None where that is not known.
        config: Fields of ViTConfig; None for a model that is not fathoms' own.
        sites_after: Steps after which the branches were measured; 0 for those of the model as it was given.
    """

    steps: int = CALIBRATED_STEPS
    images: int | None = None
    config: Config = None
    sites_after: int = 0


def _told(features: Features, limits: Thresholds) -> Features:
    """The numbers that may be judged: of a shallow stack neither a factor per block nor the largest branch."""
    blocks = features.get("blocks")
    if blocks is None or blocks >= limits.fewest_blocks:
        return features
    return {name: value for name, value in features.items() if name not in OF_DEPTH}


def _decide(features: Features, limits: Thresholds) -> tuple[str, bool]:
    """The outcome, and whether the calibration measured how often it comes true."""

    def above(name: str, limit: float) -> bool:
        value = features.get(name)
        return value is not None and value > limit

    if features.get("nonfinite") or above("loss_rise", limits.loss_rise):
        return "diverges", True
    factor = features.get("gradient_factor")
    uneven = factor is not None and not limits.vanish_factor <= factor <= limits.gradient_factor
    alike = above("after_token_cosine", limits.token_cosine)
    overwritten = above("after_ratio_max", limits.branch_ratio)
    if uneven or alike or overwritten or features.get("loss_rise") is None:
        return "not judged", False
    return "trains", features.get("after_ratio_max") is not None


def start_verdict(
    features: Features, sites: Sites, limits: Thresholds = THRESHOLDS, basis: Basis | None = None
) -> Verdict:
    """The outcome with every finding, those that decide it first."""
    basis = basis or Basis()
    features = _told(features, limits)
    few = []
    stepped = features.get("nonfinite") is not None
    if stepped and basis.images is not None and basis.images < limits.fewest_images:
        text = (
            f"steps of {plural(basis.images, 'image')} say little: the loss differs as much between batches"
        )
        few = [Finding("few images", False, text, f"--batch-size {limits.fewest_images} or more")]
        features = {name: value for name, value in features.items() if name not in OF_STEPS}
    found = [
        *few,
        *_of_gradient(features, limits, basis),
        *_of_steps(features, limits, basis),
        *_of_blocks(features, sites, limits, basis),
    ]
    found.sort(key=lambda finding: not finding.bad)
    if few:
        features = {**features, "loss_rise": None}
    return Verdict(*_decide(features, limits), found)


def verdict_of(signal: Signal, steps: FirstSteps | None) -> Verdict:
    """The verdict on a start, from its first steps where they were taken."""
    first = signal.to_json()["sites"]
    if steps is None:
        found = start_verdict(start_features(signal), first, basis=Basis(config=signal.config))
        return replace(found, basis="from the initialisation alone, which misleads")
    after = None if steps.after is None else steps.after.to_json()["sites"]
    basis = Basis(steps.steps, steps.batch_size, signal.config, 0 if after is None else steps.steps)
    features = start_features(signal, steps.after, steps.losses)
    found = start_verdict(features, first if after is None else after, basis=basis)
    losses = [f"{loss:.3g}" if math.isfinite(loss) else "not finite" for loss in steps.losses]
    text = f"{steps.opt} at lr {steps.lr:g}, {plural(len(losses), 'step')}, loss {losses[0]} -> {losses[-1]}"
    if found.outcome == "trains" and steps.classes and steps.losses[-1] > math.log(steps.classes) - A_GUESS:
        words = f"after {plural(len(losses), 'step')} the loss is that of a guess, ln({steps.classes})"
        more = Finding("a guess", True, words, f"--steps {10 * steps.steps} says more")
        found = Verdict("not judged", findings=[more, *found.findings])
    share = PRECISION.get(found.outcome) if found.calibrated else None
    if share is not None and not is_calibrated(steps, signal.depth):
        share, text = None, f"{text}; outside what was calibrated, {CALIBRATED}"
    return replace(found, basis=text, came_true=share)


def _of_gradient(features: Features, limits: Thresholds, basis: Basis) -> list[Finding]:
    factor = features.get("gradient_factor")
    if features.get("gradient_last") == 0:
        text = "no gradient reaches the blocks before the first update: the classifier is zero"
        return [Finding("no gradient yet", False, text, "nothing to do; the steps below are what counts")]
    if factor is None:
        return []
    if factor > limits.gradient_factor:
        text = f"the gradient explodes by x{factor:.3g} per block towards the first block"
        return [Finding("gradient explodes", True, text, against_explosion(basis.config))]
    if factor < limits.vanish_factor:
        text = f"the gradient vanishes by x{factor:.3g} per block towards the first block"
        return [Finding("gradient vanishes", True, text, against_vanishing(basis.config))]
    return []


def _of_steps(features: Features, limits: Thresholds, basis: Basis) -> list[Finding]:
    """Findings of the first steps."""
    found = []
    count = plural(basis.steps, "step")
    lower, gentler = against_divergence(basis.config), against_stalling(basis.config)
    rise, stream = features.get("loss_rise"), features.get("stream_max_rise")
    if features.get("nonfinite"):
        found.append(Finding("not finite", True, f"within {count} a number is no longer finite", lower))
    elif rise is not None and rise > limits.loss_rise:
        text = f"within {count} the loss is up to {rise:.3g} above its first value"
        found.append(Finding("loss rises", True, text, lower))
    if stream is not None and stream > limits.stream_rise:
        found.append(
            Finding("stream rises", False, f"the stream grows by x{stream:.3g} within {count}", lower)
        )
    cosine, ratio = features.get("after_token_cosine"), features.get("after_ratio_max")
    if cosine is not None and cosine > limits.token_cosine:
        text = f"after {count} all tokens of an image are alike (mean cosine {cosine:.3g})"
        found.append(Finding("tokens alike", True, text, gentler))
    if ratio is not None and ratio > limits.branch_ratio:
        text = f"after {count} a branch adds x{ratio:.3g} of the stream, and so overwrites it"
        found.append(Finding("stream overwritten", True, text, gentler))
    return found


def _of_blocks(features: Features, sites: Sites, limits: Thresholds, basis: Basis) -> list[Finding]:
    """Findings that do not decide the verdict."""
    found = []
    power = features.get("growth_power")
    if power is not None and power > limits.growth_power:
        text = f"the stream grows like depth^{power:.2g}"
        found.append(Finding("stream grows", False, text, against_growth(basis.config)))
    found += _of_silence(sites, limits, basis)
    for name, limit, (kind, words, helps) in _limits(limits, basis):
        over = [site for site in sites if _is(site, name, lambda value, limit=limit: value > limit)]
        if over:
            worst = max(over, key=lambda site, name=name: site[name])
            text = words.format(place=place(worst), value=worst[name])
            found.append(Finding(kind, False, f"{_when(basis)}{text}", helps))
    sharp = [site for site in sites if _is(site, "entropy", lambda value: value < limits.entropy)]
    if sharp:
        worst = min(sharp, key=lambda site: site["entropy"])
        # Rounding leaves the entropy of one token a little below zero.
        at = f"at {place(worst)} (entropy {max(0.0, worst['entropy']):.2g} of its maximum)"
        words = f"{_when(basis)}attention is saturated {at}"
        found.append(Finding("attention saturated", False, words, against_logits(basis.config)))
    return found


def _when(basis: Basis) -> str:
    """The time of the branches' numbers, where they are not those of the table."""
    return f"after {plural(basis.sites_after, 'step')} " if basis.sites_after else ""


def _of_silence(sites: Sites, limits: Thresholds, basis: Basis) -> list[Finding]:
    """Branches that add next to nothing although no residual scale intends it."""
    quiet = [site for site in sites if _is(site, "ratio", lambda value: value < limits.silent_ratio)]
    meant = basis.config is not None and basis.config["residual"] in QUIET
    if not quiet or meant or any(site.get("gamma_mean") is not None for site in quiet):
        return []
    least = min(site["ratio"] for site in quiet)
    count = f"{len(quiet)} of {len(sites)} branches {'is' if len(quiet) == 1 else 'are'} silent"
    text = f"{_when(basis)}{count} (branch/stream {least:.2g}), and no residual scale is the reason"
    return [Finding("silent branches", False, text, against_silence(basis.config))]


def _limits(limits: Thresholds, basis: Basis) -> list[tuple[str, float, tuple[str, str, str]]]:
    """Columns with an upper limit: column, limit, and kind, words and what helps."""
    overflow = "float16 would overflow at {place} (largest value {value:.3g})"
    flat = "{value:.0%} of the values are on the flat parts of the curve at {place}"
    dead = "{value:.0%} of the hidden units are dead at {place}"
    logits = (
        "attention logits",
        "attention logits reach {value:.3g} at {place}",
        against_logits(basis.config),
    )
    return [
        ("largest", limits.float16, ("float16 overflows", overflow, "bfloat16, or a norm")),
        ("logit", limits.logit, logits),
        ("saturated", limits.saturated, ("curve saturated", flat, "a smaller --norm-init")),
        ("dead", limits.dead, ("dead units", dead, "a lower --lr")),
    ]


def _is(site: dict[str, Any], name: str, holds: Any) -> bool:
    return site.get(name) is not None and holds(site[name])


def place(site: dict[str, Any]) -> str:
    """Block and branch of a site."""
    return f"{site['block']} {site['branch']}"


Row = dict[str, Any]
FEWEST = 4
"""Measurements below which no trend is reported."""


def drift_verdict(rows: Sequence[Row], config: Config = None) -> Verdict | None:
    """The trend over the second half of a run's probe.jsonl; None where there are too few measurements."""
    rows = [row for row in rows if isinstance(row.get("sites"), list) and row["sites"]]
    if len(rows) < FEWEST:
        return None
    found = []
    for kind, name, limit, words, helps in _watched(THRESHOLDS, config):
        points = []
        for row in rows:
            pairs = [(site[name], site) for site in row["sites"] if site.get(name) is not None]
            if pairs:
                furthest = (max if limit > 0 else min)(pairs, key=lambda pair: pair[0])
                points.append((float(row.get("step", 0)), furthest))
        finding = _trend(kind, points, limit, words, helps) if len(points) >= FEWEST else None
        found += [] if finding is None else [finding]
    found += _gamma(rows) + _updates(rows[-1], THRESHOLDS)
    return Verdict("drifts" if any(finding.bad for finding in found) else "steady", findings=found)


def _watched(limits: Thresholds, config: Config) -> list[tuple[str, str, float, str, str]]:
    """Watched quantities: kind, column, limit, words, what helps. A limit below zero is a lower one."""
    collapse, logits = (
        ", or ".join(dict.fromkeys((against_logits(config), other)))
        for other in ("a lower --lr", "weight decay on q and k")
    )
    scale, bits = "drop path, registers, or a residual scale", "a norm, or bfloat16 instead of float16"
    return [
        ("tokens alike", "token_cosine", 0.95, "tokens grow alike", scale),
        ("entropy collapses", "entropy", -limits.entropy, "attention entropy collapses", collapse),
        ("logits grow", "logit", limits.logit, "attention logits grow", logits),
        ("curve saturates", "saturated", limits.saturated, "DyT saturates", "a smaller --norm-init"),
        ("units die", "dead", limits.dead, "hidden units die", "a lower --lr"),
        ("values grow", "largest", limits.float16, "activations grow", bits),
    ]


def _trend(
    kind: str, points: Sequence[tuple[float, tuple[float, Row]]], limit: float, words: str, helps: str
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
    moved = abs(now - start) > THRESHOLDS.drift * abs(bound - start)
    heading = (ahead > bound if upper else ahead < bound) and moved
    if not beyond and not heading:
        return None
    pace = f", {bound:.3g} in {abs((bound - now) / slope):.0f} updates at this pace" if slope else ""
    left = "" if beyond else pace
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
