"""List the parts that each option of a model can name."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass

import tyro

from fathoms.errors import flag_of

EXAMPLES = """
fathoms parts
fathoms parts residual
fathoms parts --json
"""


@dataclass(frozen=True)
class Args:
    """Options of `fathoms parts`."""

    family: tyro.conf.Positional[str | None] = None
    """One family, for example norm. Default: all."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Print each family's names with a one-line summary."""
    from fathoms.names.registry import check_name
    from fathoms.parts import families

    known = families()
    chosen = list(known) if args.family is None else [check_name(args.family, known, "family")]
    listing = {family: {name: known[family].summary(name) for name in known[family]} for family in chosen}
    if args.json:
        print(json_format.dumps(listing))
        return 0
    for family, parts in listing.items():
        print(flag_of(family))
        for name, summary in parts.items():
            print(f"  {name:<20}{summary}")
    return 0
