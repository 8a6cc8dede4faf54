"""Signal propagation at initialisation, for each residual method at depths 12 to 96.

    python benchmarks/signal_at_init.py

writes results/signal_at_init.json (every block) and results/signal_at_init.md (five blocks of each).
The model is the narrow ViT of `fathoms probe` (64 wide, 8x8 digits, one batch of 64, seed 0). Each method is
measured with LayerNorm, as in CaiT's comparison, and without any norm where the method allows it, as in the
papers of Fixup, T-Fixup, ReZero and SkipInit. Fixup's classifier starts at zero, which passes no gradient before
the first update; here it is initialised as the others are, so that the gradient reaches the blocks.
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
from fathoms.parts.linears import STD
from fathoms.parts.residuals import RESIDUALS
from fathoms.probes.signal import probe

DEPTHS = (12, 24, 48, 96)
RESULTS = Path(__file__).parents[1] / "results"


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Norm, method and model options of every row."""
    listed = []
    for residual in RESIDUALS:
        method = RESIDUALS.metadata(residual)
        placement = method.placements[0]
        options = {"residual": residual, "attn_placement": placement, "mlp_placement": placement}
        listed.append(("layernorm", residual, options))
        if not method.needs_norm:
            listed.append(("norm-free", residual, {**options, "norm": "none"}))
    return listed


def measure(depth: int, residual: str, options: dict[str, Any]) -> dict[str, Any]:
    """Branch-to-stream ratio and gradient norm after each block, mean of attention and MLP."""
    torch.manual_seed(0)
    images, labels = digits()
    model = ViT(model_config("vit_digits", depth=depth, **options))
    if RESIDUALS.metadata(residual).zero_head:
        torch.nn.init.trunc_normal_(model.head.weight, std=STD)
    signal = probe(model, images[:64], labels[:64], light=True)
    blocks = list(zip(signal[0::2], signal[1::2], strict=True))
    return {
        "depth": depth,
        "residual": residual,
        "growth": signal.growth,
        "gradient_ratio": signal.gradient_ratio,
        "ratio": [(attn.ratio + mlp.ratio) / 2 for attn, mlp in blocks],
        "gradient": [mlp.gradient for _, mlp in blocks],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, five blocks of each."""
    lines = [
        "# The signal at the start of training",
        "",
        "`python benchmarks/signal_at_init.py`; every block is in `signal_at_init.json`.",
        "Ratio is the root mean square of what a branch adds over that of what it is added to, the mean of "
        "attention and MLP. Gradient is the norm of the loss's gradient on the stream after the block. Both stand at "
        "the first block, at a quarter, half and three quarters of the depth, and at the last block. Fixup's "
        "classifier, zero at the start, is started here as the others are, or no gradient would reach a block.",
        "",
        "| norm | residual | depth | stream grows | gradient first / last | ratio | gradient |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        last = row["depth"] - 1
        picks = [0, last // 4, last // 2, 3 * last // 4, last]
        ratio = " · ".join(f"{row['ratio'][index]:.2g}" for index in picks)
        gradient = " · ".join(f"{row['gradient'][index]:.2g}" for index in picks)
        head = f"{row['form']} | {row['residual']} | {row['depth']} | {row['growth']:.3g}"
        lines.append(f"| {head} | {row['gradient_ratio']:.3g} | {ratio} | {gradient} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all and write both files."""
    rows = [
        {"form": form, **measure(depth, residual, options)}
        for form, residual, options in cases()
        for depth in DEPTHS
    ]
    RESULTS.mkdir(exist_ok=True)
    text = {"command": "python benchmarks/signal_at_init.py", "seed": 0, "rows": rows}
    (RESULTS / "signal_at_init.json").write_text(json.dumps(text, allow_nan=False) + "\n")
    (RESULTS / "signal_at_init.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
