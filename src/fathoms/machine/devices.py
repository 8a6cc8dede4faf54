"""Names of devices: what --device takes. Importing this file does not import torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fathoms.errors import ConfigError


def check_device(name: str) -> str:
    """Return the name of a device; one that nothing here runs on is refused."""
    if name == "mps":
        raise ConfigError("--device mps: Apple GPUs have no float64, which metrics are summed in; use cpu")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name, re.ASCII):
        raise ConfigError(f"--device {name}: unknown device; use auto, cpu or cuda")
    return name


def visible_gpus(device: str) -> list[str]:
    """The GPUs that --device allows, as CUDA_VISIBLE_DEVICES names them, asked without loading torch."""
    if device not in ("auto", "cuda") and not device.startswith("cuda:"):
        return []
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    gpus = [str(index) for index in range(found)] if shown is None else _named(shown)
    _, chosen, index = device.partition(":")
    if not chosen:
        return gpus
    if int(index) >= len(gpus):
        raise ConfigError(f"--device {device}: there are {len(gpus)} GPUs, numbered from 0")
    return [gpus[int(index)]]


def _named(shown: str) -> list[str]:
    """The GPUs that the variable names; as for CUDA, -1 ends them."""
    names = [word.strip() for word in shown.split(",")]
    return [name for name in names[: names.index("-1") if "-1" in names else None] if name]
