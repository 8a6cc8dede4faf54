"""Memory of this machine, or of the container in which the process runs. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")


def usable_memory(root: Path = ROOT) -> int | None:
    """Bytes that the processes here may use: the machine's, or its container's limit; None where it does not say."""
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return None
    for limit in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            # Without a limit a container says "max", or a number beyond any machine's memory.
            found.append(int((root / limit).read_text()))
        except (OSError, ValueError):
            continue
    return min(found)
