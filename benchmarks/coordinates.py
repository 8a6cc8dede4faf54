"""The coordinate check over depth of every residual method, and of KEEL: `python benchmarks/coordinates.py`.

writes results/coordinates.json and results/coordinates.md. Ten updates of AdamW at 1e-3, with the method's own
parameter groups, on one batch of 8 random images, at depths 2 to 32 of a ViT of 32 channels, three seeds; a minute or
two on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fathoms.models.config import ViTConfig
from fathoms.models.vit import ViT
from fathoms.parts.residuals.prores import set_progress
from fathoms.parts.residuals.residual import RESIDUALS
from fathoms.probes.coordinates import Coordinates, coordinate_check

RESULTS = Path(__file__).parents[1] / "results"
DEPTHS = (2, 8, 32)
TINY = {"image_size": 8, "patch_size": 2, "dim": 32, "heads": 2, "mlp_ratio": 2.0, "num_classes": 10}
# Where ten updates are in a run of 1000.
PROGRESS = 0.01


def check(residual: str, placement: str | None = None) -> Coordinates:
    """The check of one method, in the first placement that it allows unless another is given."""
    method = RESIDUALS.metadata(residual)
    placement = placement or method.placements[0]
    options: dict[str, Any] = {"residual": residual, "attn_placement": placement, "mlp_placement": placement}
    if method.alpha is not None:
        options["base_depth"] = DEPTHS[0]

    def build(depth: int) -> ViT:
        model = ViT(ViTConfig(**TINY, depth=depth, **options))
        set_progress(model, PROGRESS)
        return model

    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return coordinate_check(build, DEPTHS, images, torch.arange(8), seeds=range(3))


def as_table(found: dict[str, Coordinates]) -> str:
    """The slopes as Markdown."""
    lines = [
        "# Coordinate check over depth",
        "",
        "Made by `python benchmarks/coordinates.py`: exponent of the depth in the rise of mean |x| after the last "
        f"block and of the mean |logit|, in ten updates of AdamW at depths {', '.join(map(str, DEPTHS))}, three seeds. "
        "Near zero, one learning rate does the same at every depth. "
        f"prores is at {PROGRESS:.0%} of a run, deepnorm is post-norm, keel the placement with residual none, the "
        "others are pre-norm.",
        "",
        "| residual | stream, exponent (95 %) | logits, exponent | verdict |",
        "|---|---|---|---|",
    ]
    for name, each in found.items():
        stream, logits = each.stream, each.logits
        lines.append(
            f"| {name} | {stream.value:+.2f} ({stream.low:+.2f} to {stream.high:+.2f}) | {logits.value:+.2f} "
            f"| {each.verdict} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Check every method and write both files."""
    found = {}
    for name in [*RESIDUALS, "keel"]:
        # Which is a placement, and the only one that scales the skip by a rule of its own.
        found[name] = check("none", "keel") if name == "keel" else check(name)
        print(f"{name}: {found[name].stream.value:+.2f}, {found[name].verdict}", flush=True)
    rows = {name: each.to_json() for name, each in found.items()}
    (RESULTS / "coordinates.json").write_text(json.dumps({"depths": DEPTHS, "rows": rows}, indent=1) + "\n")
    (RESULTS / "coordinates.md").write_text(as_table(found))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
