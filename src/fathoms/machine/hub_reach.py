"""Reach of the Hugging Face Hub: asked once with a time limit; out of reach, its clients look into their cache only.

The clients retry for minutes where there is no network. Whatever calls one does so inside `hub_or_cache`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

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
