"""Signal at initialisation with each part of every family but `residual`, at depths 12 to 96.

    python benchmarks/signal_by_part.py

writes results/signal_by_part.json: growth of the stream, and its gradient at the first block over the last.
The model is the narrow ViT of `fathoms probe` (64 wide, 8x8 digits, one batch of 64, seed 0), all of it at its
defaults but for the one part. The residual methods are in results/signal_at_init.json, with and without norms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fathoms.data.sources.arrays import digits
from fathoms.models.vit import ViT
from fathoms.models.zoo import model_config
from fathoms.parts import families
from fathoms.probes.signal import probe

DEPTHS = (12, 24, 48, 96)
RESULTS = Path(__file__).parents[1] / "results"
# Registered for the read-out of the same name, which builds it; not a value of the option.
NOT_A_VALUE = {("attention", "class_attention")}
# The patches of CCT's stem are the stride of its convolutions and poolings.
NEEDS: dict[tuple[str, str], dict[str, Any]] = {("stem", "conv"): {"patch_size": 2}}


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Family, part and model options of every row; a placement is that of attention and MLP together."""
    listed = []
    for family, registry in families().items():
        if family in ("residual", "mlp_placement"):
            continue
        for name in registry:
            if (family, name) not in NOT_A_VALUE:
                both = {"mlp_placement": name} if family == "attn_placement" else {}
                listed.append((family, name, {family: name, **both, **NEEDS.get((family, name), {})}))
    return listed


def measure(depth: int, options: dict[str, Any]) -> dict[str, float]:
    """Growth of the stream, and its gradient at the first block over the last."""
    torch.manual_seed(0)
    images, labels = digits()
    model = ViT(model_config("vit_digits", depth=depth, **options))
    signal = probe(model, images[:64], labels[:64], light=True)
    return {"growth": signal.growth, "gradient_ratio": signal.gradient_ratio}


def main() -> None:
    """Measure all and write the file."""
    rows = []
    for family, name, options in cases():
        for depth in DEPTHS:
            rows.append({"family": family, "part": name, "depth": depth, **measure(depth, options)})
            print(rows[-1], flush=True)
    text = {"command": "python benchmarks/signal_by_part.py", "seed": 0, "rows": rows}
    (RESULTS / "signal_by_part.json").write_text(json.dumps(text, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
