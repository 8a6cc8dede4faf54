"""Convert an untrusted .pth file to safetensors, and list its contents.

The file is opened in another process, weights-only, with limits on memory, time and size; a file that would
run code is refused.
"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from fathoms.cli.flags.early_checks import check_data
from fathoms.errors import printable
from fathoms.files import check_absent

EXAMPLES = """
fathoms convert S24_224.pth cait_s24_224.safetensors
fathoms convert checkpoint.pth ema.safetensors --key model_ema
"""


@dataclass(frozen=True)
class Args:
    """Files and limits."""

    source: tyro.conf.Positional[Path]
    """A .pth, .pt or .bin file."""
    target: tyro.conf.Positional[Path]
    """The .safetensors file to write."""
    key: str = ""
    """Entry of the checkpoint to take; default: model or state_dict, where there is one."""
    max_gb: float = 16.0
    """Limit on the size of the contents, in GB."""
    seconds: int = 300
    """Limit on CPU time, in seconds."""
    overwrite: bool = False
    """Replace TARGET if it is there already."""
    json: bool = False
    """Print one JSON object."""


def run(args: Args) -> int:
    check_data(args.source, "SOURCE", "give a .pth, .pt or .bin file")
    from fathoms.models.pickled_weights import convert

    check_absent([args.target], args.overwrite)
    converted = convert(args.source, args.target, key=args.key, max_gb=args.max_gb, seconds=args.seconds)
    if args.json:
        print(json_format.dumps(asdict(converted)))
        return 0
    place = f" under {converted.taken!r}" if converted.taken else ""
    counts = f"{converted.tensors} tensors{place}, {converted.parameters:,} numbers"
    lines = [f"{args.source}: {counts}, {', '.join(converted.dtypes)}"]
    lines += [f"  holds {line}" for line in converted.top]
    lines += [f"  left out {line}" for line in converted.left_out]
    if converted.told:
        told = ", ".join(f"{name} {value}" for name, value in converted.told.items())
        lines.append(
            f"  says of its model and pixels: {told}; {args.target} alone does not, so give these as flags"
        )
    for line in [*lines, f"written to {converted.target}"]:
        print(printable(line))
    return 0
