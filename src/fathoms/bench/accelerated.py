"""Benchmark a timm model after `fathoms.accelerate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from fathoms.bench.race import Contender, Setting, prepare
from fathoms.surgery.accelerate.accelerate import AccelerateReport, accelerate


def accelerated_setting(mode: str, launch: str, compile: str = "blocks") -> Setting:
    """How an accelerated model runs at its best: as timm's does in its precision, with compiled blocks in a graph."""
    return Setting("autocast" if mode == "train" else "bf16", compile, launch, "lean")


def prepare_accelerated(
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    mode: Literal["train", "infer"],
    setting: Setting,
) -> tuple[Contender | None, AccelerateReport]:
    """The contender, or None where nothing could be replaced; and the report, which says so."""
    model = make().to(batch[0].device)
    report = accelerate(model, images=batch[0][:2])
    return (prepare("accelerated", model, *batch, mode, setting) if len(report) else None), report
