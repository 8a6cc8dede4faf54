"""The verdict on the start of training, in words: will this model train at this learning rate?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fathoms.probes.start_features import Features
from fathoms.probes.thresholds import THRESHOLDS, Thresholds

Sites = Sequence[dict[str, Any]]

QK_NORM = "--qk-norm rmsnorm"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Args:
        kind: Its name, such as "gradient explodes".
        bad: Whether it decides the verdict; otherwise it is told beside it.
        text: The sentence, with the number it rests on.
        helps: What usually helps.
    """

    kind: str
    bad: bool
    text: str
    helps: str


@dataclass(frozen=True)
class Verdict:
    """The expected outcome, "trains", "stalls" or "diverges", with its reasons."""

    outcome: str
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"outcome": self.outcome, "findings": [asdict(finding) for finding in self.findings]}


def start_outcome(features: Features, limits: Thresholds = THRESHOLDS) -> str:
    """The outcome alone, from the numbers of `start_features`; what was not measured decides nothing."""

    def above(name: str, limit: float) -> bool:
        value = features.get(name)
        return value is not None and value > limit

    def below(name: str, limit: float) -> bool:
        value = features.get(name)
        return value is not None and value < limit

    if features.get("nonfinite") or above("loss_rise", limits.loss_rise):
        return "diverges"
    if above("gradient_factor", limits.gradient_factor):
        return "diverges"
    stalls = (
        below("gradient_factor", limits.vanish_factor),
        above("after_token_cosine", limits.token_cosine),
        above("after_ratio_max", limits.branch_ratio),
    )
    return "stalls" if any(stalls) else "trains"


def start_verdict(features: Features, sites: Sites, limits: Thresholds = THRESHOLDS) -> Verdict:
    """The outcome with every finding, those that decide it first."""
    found = [
        *_of_gradient(features, limits),
        *_of_steps(features, limits),
        *_of_blocks(features, sites, limits),
    ]
    found.sort(key=lambda finding: not finding.bad)
    return Verdict(start_outcome(features, limits), found)


def _of_gradient(features: Features, limits: Thresholds) -> list[Finding]:
    factor = features.get("gradient_factor")
    if features.get("gradient_last") == 0:
        text = "no gradient reaches the blocks before the first update: the classifier is zero"
        return [Finding("no gradient yet", False, text, "nothing to do; the steps below are what counts")]
    if factor is None:
        return []
    if factor > limits.gradient_factor:
        text = f"the gradient explodes by x{factor:.3g} per block towards the first block"
        return [
            Finding(
                "gradient explodes",
                True,
                text,
                "a norm before each branch, or a residual scale that starts small",
            )
        ]
    if factor < limits.vanish_factor:
        text = f"the gradient vanishes by x{factor:.3g} per block towards the first block"
        return [Finding("gradient vanishes", True, text, "pre-norm instead of post-norm, or deepnorm")]
    return []


def _of_steps(features: Features, limits: Thresholds) -> list[Finding]:
    """Findings of the first ten steps."""
    found = []
    lower = "a lower --lr, a warm-up, or a residual scale that starts small (layerscale, rezero)"
    gentler = "a lower --lr, pre-norm, or a residual scale that starts small"
    rise, stream = features.get("loss_rise"), features.get("stream_max_rise")
    if features.get("nonfinite"):
        found.append(Finding("not finite", True, "within ten steps a number is no longer finite", lower))
    elif rise is not None and rise > limits.loss_rise:
        found.append(Finding("loss rises", True, f"the loss rises by {rise:.3g} within ten steps", lower))
    if stream is not None and stream > limits.stream_rise:
        text = f"the stream grows by x{stream:.3g} within ten steps"
        found.append(Finding("stream rises", False, text, lower))
    cosine, ratio = features.get("after_token_cosine"), features.get("after_ratio_max")
    if cosine is not None and cosine > limits.token_cosine:
        text = f"after ten steps all tokens of an image are alike (mean cosine {cosine:.3g})"
        found.append(Finding("tokens alike", True, text, gentler))
    if ratio is not None and ratio > limits.branch_ratio:
        text = f"after ten steps a branch adds x{ratio:.3g} of the stream, and so overwrites it"
        found.append(Finding("stream overwritten", True, text, gentler))
    return found


def _of_blocks(features: Features, sites: Sites, limits: Thresholds) -> list[Finding]:
    """Findings that do not decide the verdict."""
    found = []
    power = features.get("growth_power")
    if power is not None and power > limits.growth_power:
        found.append(
            Finding(
                "stream grows",
                False,
                f"the stream grows like depth^{power:.2g}",
                "a residual scale, or pre_post norms",
            )
        )
    quiet = [site for site in sites if _is(site, "ratio", lambda value: value < limits.silent_ratio)]
    if quiet:
        scaled = any(site.get("gamma_mean") is not None for site in quiet)
        why = "its scale starts small, as intended" if scaled else "and nothing is there to wake it"
        text = f"{len(quiet)} of {len(sites)} branches are silent (branch/stream {_least(quiet, 'ratio'):.2g}): {why}"
        helps = (
            "nothing to do if the scale is learned"
            if scaled
            else "a norm before the branch, or a larger init"
        )
        found.append(Finding("silent branches", False, text, helps))
    for name, limit, (kind, words, helps) in _limits(limits):
        over = [site for site in sites if _is(site, name, lambda value, limit=limit: value > limit)]
        if over:
            text = words.format(place=place(over[0]), value=max(site[name] for site in over))
            found.append(Finding(kind, False, text, helps))
    sharp = [site for site in sites if _is(site, "entropy", lambda value: value < limits.entropy)]
    if sharp:
        text = f"attention is saturated at {place(sharp[0])} (entropy {_least(sharp, 'entropy'):.2g} of its maximum)"
        found.append(Finding("attention saturated", False, text, QK_NORM))
    return found


def _limits(limits: Thresholds) -> list[tuple[str, float, tuple[str, str, str]]]:
    """Columns with an upper limit: column, limit, and kind, words and what helps."""
    overflow = "float16 would overflow at {place} (largest value {value:.3g})"
    flat = "{value:.0%} of the values are on the flat parts of the curve at {place}"
    dead = "{value:.0%} of the hidden units are dead at {place}"
    return [
        ("largest", limits.float16, ("float16 overflows", overflow, "bfloat16, or a norm")),
        (
            "logit",
            limits.logit,
            ("attention logits", "attention logits reach {value:.3g} at {place}", QK_NORM),
        ),
        ("saturated", limits.saturated, ("curve saturated", flat, "a smaller --norm-init")),
        ("dead", limits.dead, ("dead units", dead, "a lower --lr")),
    ]


def _is(site: dict[str, Any], name: str, holds: Any) -> bool:
    return site.get(name) is not None and holds(site[name])


def _least(sites: Sites, name: str) -> float:
    return min(site[name] for site in sites)


def place(site: dict[str, Any]) -> str:
    """Block and branch of a site."""
    return f"{site['block']} {site['branch']}"
