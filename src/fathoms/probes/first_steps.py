"""The first optimizer steps of a model, on a copy of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.errors import WeightsError
from fathoms.probes.blocks import unwrap
from fathoms.probes.measure import logits_of
from fathoms.probes.signal import Signal, probe
from fathoms.probes.verdicts.thresholds import CALIBRATED_STEPS


@dataclass(frozen=True)
class FirstSteps:
    """The result of the first steps.

    Args:
        losses: The loss before each step.
        norms: The norm of the whole gradient before each step.
        after: The signal after the last step; None where the weights did not stay finite.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    after: Signal | None = None


def take_first_steps(
    model: nn.Module,
    images: Float[Tensor, "M C H W"],
    labels: Int[Tensor, " M"],
    optimizer: Callable[[nn.Module], Optimizer],
    *,
    steps: int = CALIBRATED_STEPS,
    batch_size: int = 64,
) -> FirstSteps:
    """Take `steps` real optimizer steps on a copy of a model, batch after batch of the images, then probe it.

    Args:
        model: It is left as it is.
        images: As many batches as there are; they are begun again at their end.
        labels: Their classes.
        optimizer: Makes the optimizer of the copy.
        steps: Number of steps.
        batch_size: Images of a step, and of the probe.
    """
    own = copy.deepcopy(unwrap(model)).train()
    stepper = optimizer(own)
    losses, norms = [], []
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
            norms.append(
                nn.utils.get_total_norm([p.grad for p in own.parameters() if p.grad is not None]).item()
            )
            if not math.isfinite(losses[-1]):
                break
            stepper.step()
    try:
        after = probe(own, images[:batch_size], labels[:batch_size], optimizer=stepper)
    except WeightsError:
        # The steps have destroyed the weights: there is nothing to measure, and the losses say so.
        after = None
    return FirstSteps(losses, norms, after)
