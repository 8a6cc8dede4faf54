"""The origin of a run, as in environment.json: command, start, versions, commits and machine."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.machine.command import command_words
from fathoms.machine.cores import usable_cores
from fathoms.text_table import plural

if TYPE_CHECKING:
    import torch

PACKAGE = Path(__file__).parents[2]
PACKAGES = ("fathoms", "torch", "triton", "numpy", "timm", "torchvision", "safetensors")
MOST_STARTS = 50
"""Starts that are kept of a run that is resumed again and again: the first and the latest."""


def environment(before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Versions, commits and machine of this process, and every start of the run.

    Args:
        before: The same of the process that this one continues; None for a new run.
    """
    import torch

    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    earlier = (before or {}).get("starts")
    starts = [*(earlier if isinstance(earlier, list) else []), _start()]
    if len(starts) > MOST_STARTS:
        starts = [starts[0], *starts[1 - MOST_STARTS :]]
    found = torch.cuda.is_available()
    ours, project = _commit(PACKAGE, "__init__.py"), _commit(Path.cwd())
    return {
        "version": 2,
        "python": platform.python_version(),
        "versions": versions,
        "commit": ours,
        # The repository that the command was given in, where that is another one.
        "project_commit": None if project == ours else project,
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory": _memory(),
        "gpu": torch.cuda.get_device_name() if found else None,
        "gpu_memory": torch.cuda.get_device_properties(0).total_memory if found else None,
        "starts": starts,
    }


def describe_device(device: torch.device) -> str:
    """The device of a run and the threads of this process, in a line."""
    import torch

    threads = f"{plural(torch.get_num_threads(), 'thread')} on {plural(usable_cores(), 'core')}"
    if device.type != "cuda":
        return f"{device}, {threads}"
    memory = torch.cuda.get_device_properties(device).total_memory
    return f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB; on the host {threads}"


def _start() -> dict[str, Any]:
    """Time, machine, folder and command of this process; no command where Python code or a comparison trains."""
    words = command_words()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "folder": str(Path.cwd()),
        "command": ["fathoms", *words] if words[:1] == ("train",) else None,
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _memory() -> int | None:
    """Bytes of this machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _commit(folder: Path, tracked: str | None = None) -> str | None:
    """The commit of a folder's repository, marked where its files have changed since; None outside of one.

    With `tracked`, None unless the repository holds that file: a package installed inside of a project's folder
    does not have the project's commit.
    """
    if tracked is not None and _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit} with local changes" if _git(folder, "status", "--porcelain", "-uno") else commit


def _git(folder: Path, *words: str) -> str | None:
    """Output of a git command; None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
