"""NVIDIA's Multi-Process Service, by which kernels of several processes run on one GPU at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[bool]:
    """MPS for the processes started inside, its pipe and logs in a folder; gives whether it runs."""
    if shutil.which(CONTROL) is None:
        yield False
        return
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    before = {name: os.environ.get(name) for name in own}
    for name, path in own.items():
        Path(path).mkdir(parents=True)
        os.environ[name] = path
    runs = subprocess.run([CONTROL, "-d"], capture_output=True, check=False).returncode == 0
    try:
        yield runs
    finally:
        if runs:
            subprocess.run([CONTROL], input=b"quit\n", capture_output=True, timeout=60, check=False)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
