"""Turn a .pth file from somebody else into safetensors, and say what is inside.

The file is opened in another process, weights-only, with limits on memory, time and size; one that wants to
run code is refused.
"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from fathoms.errors import printable

EXAMPLES = """
fathoms convert S24_224.pth cait_s24_224.safetensors
fathoms convert checkpoint.pth ema.safetensors --key model_ema
"""


@dataclass(frozen=True)
class Args:
    """What to convert, and under which limits."""

    source: tyro.conf.Positional[Path]
    """A .pth, .pt or .bin file."""
    target: tyro.conf.Positional[Path]
    """The .safetensors file to write."""
    key: str = ""
    """Which entry of the checkpoint to take; found by itself where it is called model or state_dict."""
    max_gb: float = 16.0
    """Most gigabytes the contents may take."""
    seconds: int = 300
    """Most seconds of processor time."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    """Convert, then print what was found."""
    from fathoms.export.convert import convert

    told = convert(args.source, args.target, key=args.key, max_gb=args.max_gb, seconds=args.seconds)
    if args.json:
        print(json_format.dumps(asdict(told)))
        return 0
    place = f" under {told.taken!r}" if told.taken else ""
    lines = [
        f"{args.source}: {told.tensors} tensors{place}, {told.parameters:,} numbers, {', '.join(told.dtypes)}"
    ]
    lines += [f"  holds {line}" for line in told.top]
    lines += [f"  left out {line}" for line in told.left_out]
    for line in [*lines, f"written to {told.target}"]:
        print(printable(line))
    return 0
