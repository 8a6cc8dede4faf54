"""The nearest path: for one that does not exist, an existing one that differs by misspelt parts."""

from __future__ import annotations

import difflib
import itertools
import os
from pathlib import Path

# Entries of a folder that are looked at; a folder of a million images is not listed for a misspelt name.
_MOST = 10_000
_LONGEST = 500
# Two names are alike from here on: one letter of three may differ.
ALIKE = 0.66


def nearest_path(path: str | Path) -> Path | None:
    """The existing path nearest to one that does not exist, part by part; None where a part is like no entry."""
    path = Path(path)
    if not path.parts or len(str(path)) > _LONGEST or "\0" in str(path):
        return None
    here = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if os.path.lexists(here / part):
            here = here / part
            continue
        found = _alike(here, part)
        if found is None:
            return None
        here = here / found
    return here


def _alike(folder: Path, name: str) -> str | None:
    """The entry of a folder most like a name: one that begins with it, or the most alike."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, _MOST))
    except OSError:
        return None
    longer = [entry for entry in names if len(name) > 2 and entry.lower().startswith(name.lower())]
    near = difflib.get_close_matches(name, names, n=3, cutoff=ALIKE)
    # Two names are not alike because both end in .txt.
    near = [entry for entry in near if _stems_alike(name, entry)]
    return next(iter([*longer, *near]), None)


def _stems_alike(name: str, entry: str) -> bool:
    return difflib.SequenceMatcher(None, Path(name).stem, Path(entry).stem).ratio() >= ALIKE


def missing(path: str | Path, otherwise: str, kind: str = "file or folder") -> str:
    """Words on a path that does not exist: the nearest one, or else what to do."""
    if os.path.islink(path):  # noqa: PTH114 - unlike Path's, false for a name too long to exist
        return f"{path}: is a link that leads nowhere; fix it, or give the file itself"
    near = nearest_path(path)
    advice = otherwise if near is None else f"did you mean {str(near)!r}?"
    shown = str(path)
    # The system takes no longer name than this.
    shown = shown if len(shown) <= _LONGEST else f"{shown[:60]}…"
    return f"{shown}: no such {kind}; {advice}"
