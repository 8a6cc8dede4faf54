"""Is there room for this run's checkpoints? Asked before the first step, not after the first night."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.weights import weights_of

MOMENTS = {"adamw": 2, "lamb": 2, "muon": 2, "sgd": 1, "momentum": 1}
"""Numbers that an optimizer keeps for each parameter, at most."""
MARGIN = 1 << 20
"""Headers, state.json and metrics."""


def file_sizes(model: nn.Module, opt: str, averaged: bool) -> dict[str, int]:
    """Bytes of each file of a checkpoint, at most."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in weights_of(model).values())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return {"model": weights, "ema": weights if averaged else 0, "optimizer": MOMENTS[opt] * trained}


def check_room(folder: Path, sizes: dict[str, int], keep: int) -> None:
    """Refuse a run whose checkpoints do not fit: those kept, the best, and the one being written."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(sizes.values())
    if limit != resource.RLIM_INFINITY and largest > limit:
        raise ConfigError(
            f"{folder}: a checkpoint has a file of {megabytes(largest)}, and the system allows "
            f"{megabytes(limit)}; raise `ulimit -f`"
        )
    needed = (keep + 2) * (sum(sizes.values()) + MARGIN)
    free = shutil.disk_usage(folder).free + _taken(folder)
    if needed > free:
        raise ConfigError(
            f"{folder}: {keep + 2} checkpoints of {megabytes(sum(sizes.values()))} need {megabytes(needed)}, and "
            f"{megabytes(free)} are free; make room, choose another --output or a smaller --checkpoint-hist"
        )


def _taken(folder: Path) -> int:
    """Bytes that checkpoints hold already and new ones will replace; a file with two names counts once."""
    stats = [path.lstat() for path in folder.rglob("*.safetensors")]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def megabytes(size: int) -> str:
    """A size in words."""
    return f"{size / 1e6:,.1f} MB" if size < 1e10 else f"{size / 1e9:,.1f} GB"
