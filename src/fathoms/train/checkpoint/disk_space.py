"""Check before the first update that the disk has room for a run's checkpoints."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.param_groups import state_bytes
from fathoms.models.weights import weights_of
from fathoms.names.optimizers import OptimizerName

MARGIN = 1 << 20
"""Bytes for headers, state.json and metrics."""


def file_sizes(model: nn.Module, opt: OptimizerName, ema: bool) -> dict[str, int]:
    """Largest size in bytes of each file of a checkpoint."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in weights_of(model).values())
    return {"model": weights, "ema": weights if ema else 0, "optimizer": state_bytes(model, opt)}


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
    free = shutil.disk_usage(folder).free + _held(folder)
    if needed > free:
        raise ConfigError(
            f"{folder}: {keep + 2} checkpoints of {megabytes(sum(sizes.values()))} need {megabytes(needed)}, and "
            f"{megabytes(free)} are free; make room, choose another --output or a smaller --checkpoint-hist"
        )


def _held(folder: Path) -> int:
    """Bytes of the existing checkpoints, which new ones will replace; hard links count once."""
    stats = [path.lstat() for path in folder.rglob("*.safetensors")]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def megabytes(size: int) -> str:
    """A size as text."""
    return f"{size / 1e6:,.1f} MB" if size < 1e10 else f"{size / 1e9:,.1f} GB"
