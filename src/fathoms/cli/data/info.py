"""Describe a data set: its kind, splits, classes and sizes, without decoding it.

Exit status: 0, or 2 if it could not be opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tyro

from fathoms.errors import printable

EXAMPLES: str = """\
fathoms data info photos/
fathoms data info packed/ --json
fathoms data info cifar-10-batches-bin/
"""


@dataclass(frozen=True)
class Args:
    """Data set to describe."""

    path: tyro.conf.Positional[str]
    """Folder, .tar, folder of shards, pack, .npz, IDX or CIFAR folder, or hfds/NAME."""
    json: bool = False
    """Print one JSON object on the last line."""


def run(args: Args) -> int:
    """Print the kind, the splits and the decoder."""
    from fathoms.data import ArraySource, choose_decoder, list_splits, open_source
    from fathoms.data.sources.detect import detect
    from fathoms.data.sources.left_out import left_out_of
    from fathoms.data.tools.notices import notices

    kind, decoder = detect(args.path), choose_decoder("auto")
    splits: dict[str, Any] = {}
    sources = [open_source(args.path, name, kind) for name in list_splits(args.path, kind)]
    for source in sources:
        facts: dict[str, Any] = {
            "images": len(source),
            "classes": list(source.classes),
            "fingerprint": source.fingerprint(),
        }
        if isinstance(source, ArraySource):
            facts["shape"] = list(source.images.shape[1:])
            facts["bytes"] = source.images.nbytes
        else:
            facts["bytes"] = sum(source.size(i) for i in range(len(source)))
        splits[source.split] = facts
    print(printable(f"{args.path}: {kind}"))
    for name, facts in splits.items():
        shown = ", ".join(repr(c) for c in facts["classes"][:5]) + (
            ", …" if len(facts["classes"]) > 5 else ""
        )
        shape = f", {'x'.join(map(str, facts['shape']))} pixels" if "shape" in facts else ""
        print(
            f"  {printable(name)}: {facts['images']} images{shape}, {facts['bytes'] / 1e6:.1f} MB, "
            f"{len(facts['classes'])} classes ({shown}), fingerprint {facts['fingerprint'][:12]}"
        )
    lines = notices(sources)
    for line in lines:
        print(printable(line))
    print(f"decoder in use: {decoder.name} ({decoder.reason})")
    if args.json:
        result = {"path": args.path, "kind": kind, "splits": splits, "notices": lines}
        result |= {"left_out": left_out_of(*sources).to_json()}
        print(json.dumps({**result, "decoder": decoder.name, "decoder_reason": decoder.reason}))
    return 0
