"""Every threshold of the probe's verdicts. `benchmarks/probe_calibration.py` measures how well they predict."""

from __future__ import annotations

from dataclasses import dataclass

FLAT_SLOPE = 0.25
"""Coordinate check: |d log rise / d log size| up to which the rise counts as flat. CompleteP's authors call 0 right;
wrong parametrisations of a ViT measured 0.7 and more, right ones 0.1 and less."""


@dataclass(frozen=True)
class Thresholds:
    """Limits of one number each; a finding is made where the number is beyond its limit.

    The first seven decide the verdict of the start, trains, stalls or diverges; `loss_rise`, `token_cosine` and
    `branch_ratio` are set by the calibration, those of the gradient and the two counts are judgement. The others make
    findings that are told beside it.
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
    """Stalls: mean cosine between two tokens after the last block, after ten steps."""
    branch_ratio: float = 0.6
    """Stalls: largest branch over stream after ten steps."""
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
PRECISION = {"trains": 0.91, "stalls": 0.47, "diverges": 0.91}
"""Share of each verdict of the start that came true, in the half of the calibration that set no threshold.

It holds for the steps and the optimizer above."""
