"""The verdict on the start of training, in words: will this model train at this learning rate?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fathoms.probes.verdicts.advice import (
    QUIET,
    Config,
    against_divergence,
    against_explosion,
    against_growth,
    against_logits,
    against_silence,
    against_stalling,
    against_vanishing,
)
from fathoms.probes.verdicts.start_features import Features
from fathoms.probes.verdicts.thresholds import CALIBRATED_STEPS, THRESHOLDS, Thresholds
from fathoms.text_table import plural

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


@dataclass(frozen=True)
class Verdict:
    """The expected outcome, "trains", "stalls", "diverges" or "not judged", with its reasons.

    Args:
        outcome: The outcome.
        findings: The reasons.
        calibrated: Whether limits that the calibration has set decided it, not those that are judgement.
    """

    outcome: str
    findings: list[Finding] = field(default_factory=list)
    calibrated: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"outcome": self.outcome, "findings": [asdict(finding) for finding in self.findings]}


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


def start_outcome(features: Features, limits: Thresholds = THRESHOLDS) -> str:
    """The outcome alone, from the numbers of `start_features`; what was not measured decides nothing."""
    return _decide(_told(features, limits), limits)[0]


def _told(features: Features, limits: Thresholds) -> Features:
    """The numbers that may be judged: of a shallow stack neither a factor per block nor the largest branch."""
    blocks = features.get("blocks")
    if blocks is None or blocks >= limits.fewest_blocks:
        return features
    return {name: value for name, value in features.items() if name not in OF_DEPTH}


def _decide(features: Features, limits: Thresholds) -> tuple[str, bool]:
    """The outcome, and whether a number decided it whose limit the calibration has set."""

    def above(name: str, limit: float) -> bool:
        value = features.get(name)
        return value is not None and value > limit

    factor = features.get("gradient_factor")
    if features.get("nonfinite") or above("loss_rise", limits.loss_rise):
        return "diverges", True
    if factor is not None and factor > limits.gradient_factor:
        return "diverges", False
    if above("after_token_cosine", limits.token_cosine) or above("after_ratio_max", limits.branch_ratio):
        return "stalls", True
    if factor is not None and factor < limits.vanish_factor:
        return "stalls", False
    return "trains", all(features.get(name) is not None for name in ("loss_rise", "after_ratio_max"))


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
    outcome, calibrated = _decide(features, limits)
    return Verdict("not judged" if few and outcome == "trains" else outcome, found, calibrated)


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
        entropy = max(0.0, worst["entropy"])
        text = (
            f"{_when(basis)}attention is saturated at {place(worst)} (entropy {entropy:.2g} of its maximum)"
        )
        found.append(Finding("attention saturated", False, text, against_logits(basis.config)))
    return found


def _when(basis: Basis) -> str:
    """The time of the branches' numbers, where they are not those of the table."""
    return f"after {plural(basis.sites_after, 'step')} " if basis.sites_after else ""


def _of_silence(sites: Sites, limits: Thresholds, basis: Basis) -> list[Finding]:
    """Branches that add next to nothing."""
    quiet = [site for site in sites if _is(site, "ratio", lambda value: value < limits.silent_ratio)]
    if not quiet:
        return []
    scheme = None if basis.config is None else basis.config["residual"]
    meant = scheme in QUIET or any(site.get("gamma_mean") is not None for site in quiet)
    least = min(site["ratio"] for site in quiet)
    are = "is" if len(quiet) == 1 else "are"
    why = "as its residual scale intends" if meant else "and no residual scale is the reason"
    text = (
        f"{_when(basis)}{len(quiet)} of {len(sites)} branches {are} silent (branch/stream {least:.2g}), {why}"
    )
    helps = "nothing to do if the scale is learned" if meant else against_silence(basis.config)
    return [Finding("silent branches", False, text, helps)]


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
