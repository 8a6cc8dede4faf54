"""The first optimizer steps: of one model, and the coordinate check (muP) of the same model at several sizes.

Models of several depths (or widths) take the same few steps on the same batch. With a parametrisation under which a
learning rate carries over from one size to another, the activations rise by the same amount at every size; without
one, the rise grows or vanishes as a power of the size. The rise is fitted, and not the level: a level that differs at
initialisation says nothing about training.

Papers: Yang et al. 2022, arXiv:2203.03466 (widths); Dey et al. 2025, arXiv:2505.01618 (depths).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.errors import ConfigError, WeightsError
from fathoms.files import finite
from fathoms.models.param_groups import param_groups
from fathoms.parts.modes import hooked
from fathoms.probes.blocks import find_blocks, unwrap
from fathoms.probes.measure import logits_of
from fathoms.probes.recorder import output_of
from fathoms.probes.signal import FirstSteps, probe
from fathoms.probes.thresholds import FLAT_SLOPE, Features, depth_features

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Build = Callable[[int], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Trajectory:
    """One model's steps: mean |x_L| and mean |logit| before each step and after the last, and the loss."""

    size: int
    seed: int
    stream: list[float]
    logits: list[float]
    loss: list[float]

    def rise(self, quantity: str) -> float:
        """How far the activations are from where they began, the largest over the steps; NaN if any is."""
        values = getattr(self, quantity)
        # Unlike max, which passes over NaN.
        return float(np.max([abs(value - values[0]) for value in values[1:]]))


@dataclass(frozen=True)
class Slope:
    """A fitted exponent: rise ~ size^value, with its interval over the seeds."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """One of "flat", "growing", "vanishing", "unclear" and "diverged".

        "flat" says that the whole interval is within `FLAT_SLOPE`, "growing" and "vanishing" that it leaves out zero.
        From one seed there is no interval, and the value alone decides.
        """
        if not math.isfinite(self.value):
            return "diverged"
        low, high = (self.low, self.high) if math.isfinite(self.low) else (self.value, self.value)
        if low >= -FLAT_SLOPE and high <= FLAT_SLOPE:
            return "flat"
        if low <= 0 <= high:
            return "unclear"
        return "growing" if self.value > 0 else "vanishing"


@dataclass(frozen=True)
class Coordinates:
    """The result of a coordinate check."""

    sizes: tuple[int, ...]
    trajectories: list[Trajectory]
    stream: Slope
    logits: Slope

    @property
    def verdict(self) -> str:
        """The verdict on the stream after the last block."""
        return self.stream.verdict

    def __repr__(self) -> str:
        return f"Coordinates({self.verdict}: the stream's rise ~ size^{self.stream.value:+.2f}, sizes {self.sizes})"

    def plot(self, size_name: str = "size") -> Figure:
        """The rise of stream and logits by size, a line per seed, and stream and loss at each step."""
        from fathoms.plotting.panels import Line, Panel, line_panels

        seeds = sorted({t.seed for t in self.trajectories})
        panels = []
        for quantity, slope in (("stream", self.stream), ("logits", self.logits)):
            lines = [
                Line(
                    f"seed {seed}",
                    [(t.size, t.rise(quantity)) for t in self.trajectories if t.seed == seed],
                    i,
                    1,
                )
                for i, seed in enumerate(seeds)
            ]
            note = f"slope {slope.value:+.2f} ({slope.low:+.2f} to {slope.high:+.2f}): {slope.verdict}"
            name = "Rise of mean |x_L|" if quantity == "stream" else "Rise of mean |logit|"
            panels.append(Panel(name, size_name, lines, True, True, x_ticks=self.sizes, notes=[note]))
        for name, quantity in (("Mean |x_L| at each step", "stream"), ("Loss at each step", "loss")):
            lines = [
                Line(f"{size_name} {t.size}", list(enumerate(getattr(t, quantity))), index + 1)
                for index, t in enumerate(t for t in self.trajectories if t.seed == seeds[0])
            ]
            panels.append(Panel(name, "step", lines, quantity == "stream"))
        return line_panels(panels, f"Coordinate check over {size_name}: {self.verdict}")

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": list(self.sizes),
            "verdict": self.verdict,
            **{
                name: {
                    "slope": finite(s.value),
                    "low": finite(s.low),
                    "high": finite(s.high),
                    "verdict": s.verdict,
                }
                for name, s in (("stream", self.stream), ("logits", self.logits))
            },
            "trajectories": [
                {
                    key: [finite(x) for x in value] if isinstance(value, list) else value
                    for key, value in vars(t).items()
                }
                for t in self.trajectories
            ],
        }


def coordinate_check(
    build: Build,
    sizes: Sequence[int],
    images: Float[Tensor, "B C H W"],
    labels: Int[Tensor, " B"] | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    lr: float = 1e-3,
    steps: int = 10,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
) -> Coordinates:
    """Take `steps` optimizer steps at every size and fit how the rise of the activations depends on the size.

    torch's random numbers are put back afterwards.

    Args:
        build: Makes a model of a size; torch is seeded before each call.
        sizes: Depths or widths, two or more.
        images: The batch, the same at every step.
        labels: Its classes; None takes two classes in turn.
        optimizer: Makes the optimizer of a model; None is AdamW at `lr` times the factors of `fathoms.param_groups`.
        lr: Learning rate of that AdamW.
        steps: Number of steps.
        seeds: One model of every size for each; the interval of the slope is over them.

    >>> from fathoms import ViT, ViTConfig
    >>> small = ViTConfig(image_size=8, patch_size=4, dim=16, heads=2, num_classes=4)
    >>> check = coordinate_check(
    ...     lambda depth: ViT(small.replace(depth=depth)), (2, 8), torch.randn(4, 3, 8, 8), steps=3, seeds=(0,)
    ... )
    >>> check.verdict
    'growing'
    """
    if len(set(sizes)) < 2 or any(size < 1 for size in sizes):
        raise ConfigError(
            f"coordinates: sizes {list(sizes)} give no slope; use two or more different sizes above 0"
        )
    if not seeds or steps < 1:
        raise ConfigError("coordinates: give one seed or more, and one step or more")
    if labels is None:
        labels = torch.arange(len(images)) % 2
    make = optimizer or (lambda model: torch.optim.AdamW(param_groups(model, 0.0).at(lr)))
    devices = [images.device] if images.is_cuda else []
    with torch.random.fork_rng(devices):
        found = [
            _take_steps(build, size, seed, (images, labels.to(images.device)), make, steps)
            for seed in seeds
            for size in sizes
        ]
    slopes = [_fit(found, quantity) for quantity in ("stream", "logits")]
    return Coordinates(tuple(sizes), found, *slopes)


def _take_steps(
    build: Build, size: int, seed: int, batch: tuple[Tensor, Tensor], make: MakeOptimizer, steps: int
) -> Trajectory:
    torch.manual_seed(seed)
    images, labels = batch
    model = build(size).to(images.device).train()
    optimizer = make(model)
    last = list(find_blocks(model).values())[-1]
    levels: list[Tensor] = []

    def keep(_block: nn.Module, _inputs: Any, output: Any) -> None:
        stream = output_of(output)
        if stream is not None:
            levels.append(stream.detach().abs().double().mean())

    logits: list[Tensor] = []
    losses: list[Tensor] = []
    with torch.enable_grad(), hooked(last.register_forward_hook(keep)):
        for step in range(steps + 1):
            output = model(images)
            loss = F.cross_entropy(output.float(), labels)
            logits.append(output.detach().abs().double().mean())
            losses.append(loss.detach().double())
            if step < steps:
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
    rows = torch.stack([torch.stack(values) for values in (levels, logits, losses)]).tolist()
    return Trajectory(size, seed, *rows)


def _fit(found: list[Trajectory], quantity: str) -> Slope:
    """The slope of log rise against log size: the mean over the seeds, and their range widened by Student's t."""
    slopes = []
    for seed in sorted({t.seed for t in found}):
        mine = [t for t in found if t.seed == seed]
        rises = [t.rise(quantity) for t in mine]
        if not all(math.isfinite(rise) and rise > 0 for rise in rises):
            return Slope(math.nan, math.nan, math.nan)
        slopes.append(float(np.polyfit(np.log([t.size for t in mine]), np.log(rises), 1)[0]))
    mean = float(np.mean(slopes))
    if len(slopes) < 2:
        return Slope(mean, -math.inf, math.inf)
    from scipy import stats

    reach = float(stats.t.ppf(0.975, len(slopes) - 1) * np.std(slopes, ddof=1) / math.sqrt(len(slopes)))
    return Slope(mean, mean - reach, mean + reach)


Rows = dict[str, dict[int, Features]]


def sweep(
    build: Callable[..., nn.Module],
    depths: Sequence[int],
    options: dict[str, dict[str, Any]],
    batch: tuple[Tensor, Tensor | None],
    seed: int = 0,
) -> Rows:
    """The numbers of every depth, by the name of the options.

    Args:
        build: Makes a model of a depth and options.
        depths: The depths.
        options: Options of the model by the name that is shown.
        batch: Images and labels.
        seed: Seed of the weights.
    """
    rows: Rows = {}
    for name, given in options.items():
        for depth in depths:
            torch.manual_seed(seed)
            signal = probe(build(depth=depth, **given), *batch)
            plain = signal.to_json()
            found = depth_features(plain["sites"]) | {"gradient_ratio": plain["gradient_ratio"]}
            rows.setdefault(name, {})[depth] = found
    return rows


STEPS, SECONDS = 50, 60.0
"""Steps that a start is judged by, or as many as this time allows."""


def take_first_steps(  # noqa: PLR0913 - seven facts of a training
    model: nn.Module,
    images: Float[Tensor, "M C H W"],
    labels: Int[Tensor, " M"],
    optimizer: MakeOptimizer | None = None,
    *,
    opt: str = "adamw",
    lr: float = 1e-3,
    steps: int = STEPS,
    batch_size: int = 64,
    seconds: float = math.inf,
) -> FirstSteps:
    """Take real optimizer steps on a copy of a model, batch after batch of the images, then probe it.

    Args:
        model: It is left as it is.
        images: As many batches as there are; they are begun again at their end.
        labels: Their classes.
        optimizer: Makes the optimizer of the copy; None is AdamW at `lr` times the factors of `fathoms.param_groups`.
        opt: Name of the optimizer, for the verdict's words.
        lr: Its learning rate.
        steps: Number of steps.
        batch_size: Images of a step, and of the probe.
        seconds: No step begins after this time.
    """
    own = copy.deepcopy(unwrap(model)).train()
    stepper = torch.optim.AdamW(param_groups(own, 0.05).at(lr)) if optimizer is None else optimizer(own)
    losses, end = list[float](), time.monotonic() + seconds
    devices = [images.device] if images.is_cuda else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        for step in range(steps):
            rows = torch.arange(step * batch_size, (step + 1) * batch_size) % len(images)
            logits = logits_of(own(images[rows]))
            loss = F.cross_entropy(logits.float(), labels[rows].to(logits.device))
            stepper.zero_grad(set_to_none=True)
            loss.backward()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            stepper.step()
            if time.monotonic() > end:
                break
    try:
        after = probe(own, images[:batch_size], labels[:batch_size], optimizer=stepper)
    except WeightsError:
        # The steps have destroyed the weights: there is nothing to measure, and the losses say so.
        after = None
    shares = torch.bincount(labels).double() / len(labels)
    return FirstSteps(losses, after, float(torch.special.entr(shares).sum()), opt, lr)
