"""Sweeps at initialisation: one model at several depths, and with several values of one option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.probes.signal import probe
from fathoms.probes.verdicts.start_features import Features, start_features

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
            found = start_features(signal) | {"gradient_ratio": signal.to_json()["gradient_ratio"]}
            rows.setdefault(name, {})[depth] = found
    return rows
