"""Probing a run while it trains: when, on how many images, and what the progress line and the guard say of it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.errors import ConfigError, FathomsError, reason
from fathoms.probes.blocks import find_blocks
from fathoms.probes.signal import probe
from fathoms.probes.verdicts.thresholds import THRESHOLDS
from fathoms.train.record.run_folder import RunFolder

SHARE = 0.02
"""Largest share of a run's time that probing takes where no interval is given."""
SETTLED = 60.0
"""Seconds of training before the first of those: one that takes a second is then within the share."""
FEWEST = 200
"""Fewest updates between two of those."""
MOST = 60
"""Most of those in a run."""
IMAGES = 64
FEW_IMAGES = 16


class Probing:
    """Measures a run's model every N updates, or as often as it stays within 2 % of the time.

    Args:
        folder: The run folder; probe.jsonl gets a line for each measurement.
        model: The model; one without transformer blocks is measured where that is asked for only, and so refused.
        every: Updates between two; 0 is never, None is the choice by time.
        updates: Updates of the whole run.
    """

    def __init__(self, folder: RunFolder, model: nn.Module, every: int | None, updates: int) -> None:
        self.folder, self.model, self.every = folder, model, every
        if every != 0:
            try:
                find_blocks(model)
            except ConfigError:
                if every is not None:
                    raise
                self.every = 0
        self.spacing = max(FEWEST, updates // MOST)
        self.spent = self.longest = 0.0
        self.last: dict[str, Any] | None = None
        self.live: dict[str, str] = {}
        """The worst block, for the progress line."""

    def due(self, updates: int, seconds: float) -> bool:
        """Whether to measure after this update; `seconds` is the time that the run has trained."""
        if self.every is not None:
            return bool(self.every) and updates % self.every == 0
        if updates % self.spacing or seconds < SETTLED:
            return False
        return self.spent + self.longest <= SHARE * seconds

    def measure(
        self, images: Tensor, labels: Tensor, optimizer: Optimizer, place: dict[str, int]
    ) -> str | None:
        """Probe the model on the first images of a batch and append the line; a warning where that failed.

        A measurement that nobody asked for must not end a run: it is then left out from here on.
        """
        if self.every is not None:
            self._measure(images[:IMAGES], labels[:IMAGES], optimizer, place)
            return None
        try:
            self._measure(images[:FEW_IMAGES], labels[:FEW_IMAGES], optimizer, place)
        except (FathomsError, torch.OutOfMemoryError) as error:
            self.every = 0
            return f"the blocks are no longer measured ({reason(error)}); --probe-interval 0 leaves it out"
        return None

    def _measure(self, images: Tensor, labels: Tensor, optimizer: Optimizer, place: dict[str, int]) -> None:
        began = time.monotonic()
        signal = probe(self.model, images, labels, optimizer=optimizer)
        self.last = {**place, **signal.to_json()}
        self.live = {"largest": _worst(self.last["sites"])}
        self.folder.append("probe.jsonl", _rounded(self.last))
        took = time.monotonic() - began
        self.spent, self.longest = self.spent + took, max(self.longest, took)

    def remark(self, update: int) -> str:
        """The last measurement before a divergence, as a part of the guard's message; else nothing."""
        if self.last is None:
            return ""
        sites = self.last["sites"]
        before = f"{update - self.last['step']} updates before"
        for column, limit, words in (
            ("logit", THRESHOLDS.logit / 2, "attention logits had reached {:.3g}"),
            ("largest", THRESHOLDS.float16 / 100, "values had reached {:.3g}"),
        ):
            found = [site for site in sites if site[column] is not None]
            site = max(found, key=lambda site: site[column], default=None)
            if site is not None and site[column] > limit:
                return f"; {site['block']}'s {words.format(site[column])}, {before}"
        return ""


def _worst(sites: list[dict[str, Any]]) -> str:
    """The largest value of all blocks, and where it is."""
    site = max(sites, key=lambda site: float("inf") if site["largest"] is None else site["largest"])
    size = "not finite" if site["largest"] is None else f"{site['largest']:.3g}"
    return f"{size} at {site['block']}"


def _rounded(value: Any) -> Any:
    """The same with six digits of every number, which halves the file."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
