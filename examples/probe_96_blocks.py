"""Probe 96 blocks before training: does the signal survive this depth?

You learn `fathoms.probe`: one batch forward and backward through any Vision Transformer, and for every residual branch
how large the stream is, what the branch adds, and the gradient that arrives. Three residual rules for 96 blocks.

    python examples/probe_96_blocks.py        # writes plain.svg, layerscale.svg and rezero.svg
"""

import torch
from sklearn.datasets import load_digits

import fathoms

RULES = {"plain": "none", "layerscale": "layerscale", "rezero": "rezero"}


if __name__ == "__main__":
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:16]).float().view(-1, 1, 8, 8) / 8 - 1

    print("96 blocks       stream grows by   gradient, first over last   a late branch adds")
    for name, residual in RULES.items():
        torch.manual_seed(0)
        model = fathoms.create_model("vit_digits", depth=96, residual=residual)
        signal = fathoms.probe(model, images, torch.tensor(labels[:16]))
        late = signal.main()[-1].ratio
        print(f"{name:<14} {signal.growth:>16.3g} {signal.gradient_ratio:>27.3g} {late:>20.3g}")
        signal.plot().savefig(f"{name}.svg")

    # Any model works, also one that fathoms did not build; every number is in the table, block by block.
    names, *_, attn, mlp = signal.table(("stream", "added", "ratio", "gradient", "entropy")).splitlines()
    print(f"\nthe last block of {name}:", names, attn, mlp, sep="\n")
