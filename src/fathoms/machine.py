"""The machine under a process: its cores and OpenMP settings, its devices, its command line, the reach of the Hub.

Importing this file does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError

ROOT = Path("/")

PASSIVE = {
    # GNU's OpenMP, and the standard's own name.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Intel's and LLVM's OpenMP spin for 200 ms unless told otherwise.
    "KMP_BLOCKTIME": "0",
}
"""Idle threads sleep. Threads that spin take the core from whatever else runs on the machine."""

# Settings of this process that are not the user's: processes that it starts choose anew.
_CHOSEN_HERE: set[str] = set()


def usable_cores() -> int:
    """Cores that this process may use: its affinity, limited by the quota of its container or scheduler."""
    limit = quota()
    return len(_affinity()) if limit is None else max(1, min(len(_affinity()), int(limit)))


def compute_threads(jobs: int = 1, root: Path = ROOT) -> int:
    """Threads for computing, if `jobs` processes share the usable cores.

    Two hyperthreads of a core share its arithmetic, so a core counts once. A thread beyond a quota would be
    stopped in the middle of a loop that all others then wait for.
    """
    siblings = {_siblings(core, root) for core in _affinity()}
    limit = quota(root)
    cores = len(siblings) if limit is None else min(len(siblings), int(limit))
    return max(1, cores // jobs)


def openmp_settings(given: Mapping[str, str], jobs: int = 1) -> dict[str, str]:
    """OpenMP's environment for one of `jobs` processes; settings that the user gave stay."""
    wanted = {"OMP_NUM_THREADS": str(compute_threads(jobs)), **PASSIVE}
    return {name: value if name in _CHOSEN_HERE else given.get(name, value) for name, value in wanted.items()}


def set_openmp() -> None:
    """Set this process's OpenMP settings, where the user has not; they are read when torch is imported."""
    for name, value in openmp_settings(os.environ).items():
        if name not in os.environ:
            os.environ[name] = value
            _CHOSEN_HERE.add(name)


def quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the control groups (v1 or v2) of this process allow; None without a limit."""
    found = [limit for folder in _groups(root) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(core: int, root: Path) -> str:
    """The hyperthreads of a core as one text; the core itself where the system does not say."""
    path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(core)


def _groups(root: Path, kind: str = "cpu") -> Iterator[Path]:
    """Folders of this process's control groups for one resource, and of all groups around them."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and kind not in controllers.split(","):
            continue
        # Inside a container the group's own folder may be mounted as the root.
        base = mount / kind if controllers else mount
        inner = base / path.lstrip("/")
        yield inner
        yield from (parent for parent in inner.parents if parent == base or base in parent.parents)


def _limit(folder: Path) -> float | None:
    """Quota over period of one control group."""
    try:
        if (folder / "cpu.max").is_file():
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if allowed in ("max", "-1") else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def free_memory(device: str, root: Path = ROOT) -> float:
    """Bytes that a process may still take: of the GPU, or of the machine within the limit of its control group."""
    import torch

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return float(torch.cuda.mem_get_info()[0])
    found = [float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    for folder in _groups(root, "memory"):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            found.append(float(limit - used))
    return max(0.0, min(found))


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


_words: tuple[str, ...] = ()


def command_words() -> tuple[str, ...]:
    """The words after `fathoms`; none where Python code calls a function of the package instead."""
    return _words


@contextlib.contextmanager
def running(words: Sequence[str]) -> Iterator[None]:
    """Let these be the words until the command has ended."""
    global _words
    before, _words = _words, tuple(words)
    try:
        yield
    finally:
        _words = before


SECONDS = 6.0
"""Limit on the Hub's first answer. The clients have none on the resolution of its name."""

_answered: set[str] = set()


def reachable(endpoint: str | None = None) -> bool:
    """Whether the Hub answers at all, with any status; an answer is remembered, silence is not."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return False
    place = endpoint or constants.ENDPOINT
    if place in _answered:
        return True

    def ask() -> None:
        # No connection, no proxy, no name: the HTTP client has its own class for each.
        with contextlib.suppress(Exception):
            get_session().head(place, timeout=SECONDS)
            _answered.add(place)

    thread = threading.Thread(target=ask, daemon=True, name="fathoms-hub")
    thread.start()
    thread.join(SECONDS)
    return place in _answered


@contextlib.contextmanager
def hub_or_cache(endpoint: str | None = None) -> Iterator[bool]:
    """Within the block the Hub's clients use their cache only if the Hub is out of reach; yields whether it answers."""
    if reachable(endpoint):
        yield True
        return
    from huggingface_hub import constants

    # The package `datasets` keeps its own copy of the setting.
    holders: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    try:
        for holder in holders:
            holder.HF_HUB_OFFLINE = True
        yield False
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value
