"""Classification losses: cross-entropy and binary cross-entropy, on labels or on soft targets.

Logits are converted to float32 or wider, also under autocast. Smoothing applies to labels only: soft targets are
smoothed by the mixing that makes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError, ShapeError
from fathoms.names.registry import Registry, check_name
from fathoms.ops.autocast import widened

LOSSES: Registry[nn.Module, None] = Registry("loss")

OVER_CLASSES = ("mean", "sum")


@LOSSES.add("cross_entropy")
class CrossEntropy(nn.Module):
    """Cross-entropy: -sum over classes of target * log softmax(logits), mean over the batch.

    Args:
        smoothing: Share of a label that is spread evenly over all classes.

    >>> CrossEntropy()(torch.zeros(2, 4), torch.tensor([0, 3])).exp().round().item()
    4.0
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = _check_smoothing(smoothing)

    def forward(self, logits: Float[Tensor, "B C"], targets: Tensor) -> Float[Tensor, ""]:
        """The loss on labels (B,) or soft targets (B, C)."""
        logits = widened(logits)
        if _are_labels(logits, targets):
            return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
        return F.cross_entropy(logits, targets.to(logits.dtype))

    def extra_repr(self) -> str:
        """Show the smoothing."""
        return f"smoothing={self.smoothing:g}"


@LOSSES.add("bce")
class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy of each class, mean over the batch.

    Args:
        smoothing: Share of a label that is spread evenly over all classes.
        target_threshold: Targets above it count as one, others as zero, after smoothing; None keeps them.
        over_classes: "mean" over the classes, or their "sum", which is C times as large.

    Papers: Beyer et al. 2020, arXiv:2006.07159; Wightman et al. 2021, arXiv:2110.00476.
    """

    def __init__(
        self, smoothing: float = 0.0, target_threshold: float | None = None, over_classes: str = "mean"
    ) -> None:
        super().__init__()
        self.smoothing = _check_smoothing(smoothing)
        if target_threshold is not None and not 0 <= target_threshold < 1:
            raise ConfigError(f"--bce-target-thresh {target_threshold}: must be in [0, 1); leave it out")
        self.target_threshold = target_threshold
        self.over_classes = check_name(over_classes, OVER_CLASSES, "reduction", "over_classes")

    def forward(self, logits: Float[Tensor, "B C"], targets: Tensor) -> Float[Tensor, ""]:
        """The loss on labels (B,) or soft targets (B, C)."""
        logits = widened(logits)
        if _are_labels(logits, targets):
            targets = _smoothed(targets, logits, self.smoothing)
        if self.target_threshold is not None:
            targets = targets > self.target_threshold
        loss = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))
        return loss if self.over_classes == "mean" else loss * logits.shape[1]

    def extra_repr(self) -> str:
        """Show the options."""
        threshold = self.target_threshold
        return f"smoothing={self.smoothing:g}, target_threshold={threshold}, over_classes={self.over_classes}"


def _check_smoothing(smoothing: float) -> float:
    if not 0 <= smoothing < 1:
        raise ConfigError(f"--smoothing {smoothing}: must be in [0, 1); 0.1 is usual")
    return smoothing


def _are_labels(logits: Tensor, targets: Tensor) -> bool:
    """Whether targets are labels (B,) rather than soft targets (B, C); anything else is an error."""
    if targets.shape == logits.shape[:1] and not targets.is_floating_point():
        return True
    if targets.shape == logits.shape and targets.is_floating_point():
        return False
    raise ShapeError(
        f"loss: targets are {tuple(targets.shape)} of {str(targets.dtype).removeprefix('torch.')} for logits of "
        f"{tuple(logits.shape)}; give integer labels (B,) or soft targets (B, C)"
    )


def _smoothed(labels: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """Soft targets of labels: 1 - s + s / C on the label, s / C elsewhere."""
    off = smoothing / logits.shape[1]
    return torch.full_like(logits, off).scatter(1, labels.long()[:, None], 1 - smoothing + off)
