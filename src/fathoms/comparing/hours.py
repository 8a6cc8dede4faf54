"""Hours that the runs of a plan would take on ImageNet, on one H200 and on eight, from speeds that were measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fathoms.text_table import plural
from fathoms.training.job import Job

IMAGES = 1_281_167
"""Training images of ImageNet."""
_192X36 = "vit_{}_embed_dim192_patch16_head3_depth36"
MEASURED = {
    _192X36.format("layernorm"): ("softmax", 192, 3_727_479_756, 7742.44),
    _192X36.format("learnable_scaler"): ("softmax", 192, 3_722_032_716, 8259.57),
    "vit_small_patch16_224": ("softmax", 384, 4_615_294_344, 10459.86),
    "vit_base_patch16_224": ("softmax", 768, 17_596_652_304, 3865.53),
    "cait_xxs24_224": ("talking_heads", 192, 2_542_751_464, 7848.38),
    "cait_s24_224": ("talking_heads", 384, 9_365_880_272, 3988.69),
}
"""Attention, channels, multiplications an image, and images/s in training as results/models.json has them."""
_STRETCH = 1.34
"""How far beyond the measured widths a rate is taken for the nearest one's."""
_LEAST_SIDE = 128
"""Side of the smallest images that count as ImageNet's."""
_EXCHANGED = 7 / (0.8 * 450e9)
"""Seconds of a parameter's float32 gradient between eight GPUs: 80 % of NVLink's 450 GB/s, nothing overlapped."""


def speed_of(job: Job) -> tuple[float, int, str] | None:
    """Images/s of a run on one H200, its parameters, and what that rests on; None where nothing does."""
    config, recipe = job.config, job.recipe
    slower = recipe.grad_checkpointing or recipe.teacher or recipe.torchcompile not in ("auto", "inductor")
    wide = recipe.precision not in ("auto", "bf16") or recipe.amp is False or recipe.amp_dtype != "bfloat16"
    if config is None or slower or wide or config.image_size < _LEAST_SIDE:
        return None
    points = [row[1:] for row in MEASURED.values() if row[0] == config.attention]
    widths = [width for width, _, _ in points]
    if not points or not min(widths) / _STRETCH <= config.dim <= max(widths) * _STRETCH:
        return None
    import torch

    from fathoms.models.vit import ViT

    with torch.device("meta"):
        model = ViT(config.replace(num_classes=1000))
    count, parameters = model.flop_count(), sum(each.numel() for each in model.parameters())
    for name, (_, width, multiplications, rate) in MEASURED.items():
        if (width, multiplications) == (config.dim, count):
            return rate, parameters, f"as measured for {name}"
    # Of two rows of a width the first counts.
    rates = dict(reversed([(math.log(width), math.log(each * rate)) for width, each, rate in points]))
    at = sorted(rates)
    per_second = math.exp(np.interp(math.log(config.dim), at, [rates[width] for width in at]))
    said = f"estimated from {count / 1e9:.2f} G multiplications at {per_second / 1e12:.0f} T/s, as measured by width"
    return per_second / count, parameters, said


def hours_of(job: Job) -> tuple[float, float, str] | None:
    """Hours of a run on one GPU and on eight, and what they rest on; None where nothing does."""
    if (found := speed_of(job)) is None:
        return None
    rate, parameters, basis = found
    batch = job.recipe.batch_size * job.recipe.grad_accum_steps
    images = job.recipe.total_epochs * IMAGES / 3600
    return images / rate, images * (1 / (8 * rate) + parameters * _EXCHANGED / batch), basis


def hours_lines(arms: Iterable[tuple[str, Job]], seeds: int) -> list[str]:
    """A line for all arms that take the same time, and one for all runs; none where nothing is known."""
    found = {name: hours_of(job) for name, job in arms}
    groups: dict[str, list[str]] = {}
    for name, hours in found.items():
        said = "not known" if hours is None else f"{_shown(hours[0])}, {_shown(hours[1])} ({hours[2]})"
        groups.setdefault(said, []).append(name)
    known = [hours[0] for hours in found.values() if hours is not None]
    if not known:
        return []
    lines = [
        f"hours of a run on ImageNet's {IMAGES:,} images on one H200, on eight (AdamW, no penalties; data and"
        " evaluation not counted):",
        *(f"  {said}: {'; '.join(names)}" for said, names in groups.items()),
    ]
    if len(known) == len(found):
        whole = f"{_shown(seeds * sum(known))}, {_shown(seeds * sum(known) / 8)}"
        lines.append(f"  {whole}: all {plural(seeds * len(known), 'run')}, each on one GPU")
    return lines


def _shown(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"
