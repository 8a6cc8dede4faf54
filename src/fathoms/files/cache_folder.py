"""The user's cache folder: ~/.cache/fathoms, or in XDG_CACHE_HOME."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder of one kind of cache, which may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fathoms" / name
