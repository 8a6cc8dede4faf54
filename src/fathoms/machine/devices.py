"""Names of devices: what --device takes. Importing this file does not import torch."""

from __future__ import annotations

import re

from fathoms.errors import ConfigError


def check_device(name: str) -> str:
    """Return the name of a device; one that nothing here runs on is refused."""
    if name == "mps":
        raise ConfigError("--device mps: Apple GPUs have no float64, which metrics are summed in; use cpu")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name, re.ASCII):
        raise ConfigError(f"--device {name}: unknown device; use auto, cpu or cuda")
    return name
