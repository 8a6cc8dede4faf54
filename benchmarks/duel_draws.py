"""The images and targets that a side of the duel draws: measured one by one, and compared as two distributions.

Imports nothing of fathoms: the peer's process measures its own (duel_peer.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy import stats

WITHOUT_POLICY = ("--aa rand-m7-mstd0.5", "--color-jitter 0")
WITHOUT_MIXING = ("--mixup 0.1 --cutmix 1", "")
STAGES = {
    "crop, flip": (WITHOUT_POLICY, WITHOUT_MIXING),
    "and RandAugment": (WITHOUT_MIXING,),
    "and mixing": (WITHOUT_POLICY,),
    "the line": (),
}
"""What of the author's line is taken out, so that a difference is found in its own stage."""


def measured(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Numbers of every image, in levels of 0 to 255, and of its target; (batches, images of a batch) each."""
    found: dict[str, list[torch.Tensor]] = {}
    for pixels, targets in batches:
        for name, values in _of_batch((pixels.float() + 1) * 127.5).items():
            found.setdefault(name, []).append(values)
        if targets.is_floating_point():
            found.setdefault("largest target", []).append(targets.amax(1))
    return {name: torch.stack(parts).double().numpy() for name, parts in found.items()}


def _of_batch(levels: torch.Tensor) -> dict[str, torch.Tensor]:
    across, down = levels.diff(dim=3), levels.diff(dim=2)
    side = levels.shape[-1]
    middle = levels[..., side // 4 : 3 * side // 4, side // 4 : 3 * side // 4]
    high, low = levels.amax(1), levels.amin(1)
    every = (1, 2, 3)
    return {
        **{name: levels[:, channel].mean((1, 2)) for channel, name in enumerate(("red", "green", "blue"))},
        "deviation": levels.std((2, 3)).mean(1),
        "gradient across": across.abs().mean(every),
        "gradient down": down.abs().mean(every),
        "second difference": across.diff(dim=3).abs().mean(every),
        "saturation": ((high - low) / high.clamp(min=1)).mean((1, 2)),
        "red - green, deviation": (levels[:, 0] - levels[:, 1]).std((1, 2)),
        "middle - whole": middle.mean(every) - levels.mean(every),
        "share of fill": ((levels - 128).abs() < 0.25).all(1).float().mean((1, 2)),
        "share below 2": (levels < 1.5).float().mean(every),
        "share above 253": (levels > 253.5).float().mean(every),
    }


def compared(there: dict[str, np.ndarray], here: dict[str, np.ndarray]) -> dict[str, Any]:
    """Of each number the means, their difference in standard errors, and p of Kolmogorov and Smirnov's test."""
    # The images of a batch share a mixture; their mean is then one observation.
    mixed = "largest target" in there
    rows = []
    for name in there:
        first, second = (side[name].mean(1) if mixed else side[name].ravel() for side in (there, here))
        error = (first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second)) ** 0.5
        apart = float((second.mean() - first.mean()) / max(error, 1e-12))
        p = float(stats.ks_2samp(first, second).pvalue)
        rows.append([name, float(first.mean()), float(second.mean()), apart, p])
    return {"images": int(there["red"].size), "rows": rows}
