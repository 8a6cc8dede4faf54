"""The page for people from other libraries, docs/coming_from.md: its tables of flags from coming_from.toml.

Every flag of the other script is answered: by the same name here, by an alias, or by an entry of the file. One that is
not stops the generator.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from doc_format import table
from fathoms.cli import train
from fathoms.cli.flags.parse import names_of


def pages(root: Path) -> dict[str, str]:
    """The text of the page, by its file name under docs/."""
    others = tomllib.loads((root / "website" / "coming_from.toml").read_text())
    text = (root / "website" / "coming_from.md").read_text()
    for name, other in others.items():
        text = text.replace(f"{{{{ {name} }}}}", flag_table(name, other))
    return {"coming_from.md": text}


def flag_table(name: str, other: dict[str, Any]) -> str:
    """All flags of one script: those of the same name in a sentence, the others in a table."""
    known, _ = names_of(train.Args)
    ours = {*known, *(f"--no-{flag.removeprefix('--')}" for flag in known)}
    theirs = other["flags"].split()
    answered = {flag for flags, _ in other["means"] for flag in flags.split()}
    same = [flag for flag in theirs if flag in ours and flag not in answered]
    aliases = [flag for flag in theirs if flag in train.ALIASES and flag not in answered]
    left = [flag for flag in theirs if flag not in {*same, *aliases, *answered}]
    gone = sorted(answered - set(theirs))
    if left or gone:
        raise ValueError(f"coming_from.toml: {name}: no answer for {left}; answers for unknown flags {gone}")
    rows = [[", ".join(f"`{flag}`" for flag in flags.split()), text] for flags, text in other["means"]]
    taken = ", ".join(f"`{flag}`" for flag in aliases)
    taken = f" Taken under their own names too: {taken}." if taken else ""
    listed = ", ".join(f"`{flag}`" for flag in same)
    return (
        f"Looked at: {other['looked_at']}, {len(theirs)} flags. **{len(same)} are the same here:** {listed}.{taken}\n\n"
        + table(["theirs", "here"], rows)
    )
