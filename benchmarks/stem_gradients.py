"""Gradient on the patch projection under each stem norm, before and after ten updates, on CIFAR-10.

    python benchmarks/stem_gradients.py cifar10.npz

writes results/stem_gradients.json; some ten minutes on two cores. The models are those of the comparison of stem norms
(192 channels, 12 blocks), and with the patch projection started as timm does (`stem_init=fan_in`): AdamW at 1e-3,
batches of 64 without augmentation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.models.config import ViTConfig
from fathoms.models.param_groups import param_groups
from fathoms.models.vit import ViT
from fathoms.parts.tokens.stem import STEM_INITS, STEM_NORMS
from fathoms.probes.first_steps import take_first_steps
from fathoms.probes.signal import probe
from fathoms.train.optim.build import build_optimizer
from fathoms.train.recipe.files import read_recipe

RESULTS = Path(__file__).parents[1] / "results"
PATCHES, SEEDS, STEPS, BATCH = (4, 8), 3, 10, 64
SHAPE = {"image_size": 32, "dim": 192, "heads": 3, "depth": 12, "num_classes": 10, "readout": "mean"}


def load(path: Path) -> tuple[Tensor, Tensor]:
    """The first batches of the training set, normalised as the recipe does."""
    recipe = read_recipe("cifar")
    with np.load(path) as file:
        images, labels = (file[name][: STEPS * BATCH] for name in ("x_train", "y_train"))
    mean, deviation = (torch.tensor(recipe[name]).view(3, 1, 1) for name in ("mean", "std"))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return (pixels - mean) / deviation, torch.from_numpy(labels.astype(np.int64))


def adamw(model: nn.Module) -> Optimizer:
    """The optimizer of the comparison."""
    return build_optimizer(param_groups(model, 0.05), "adamw", lr=1e-3)


def measure(images: Tensor, labels: Tensor, seed: int, **options: Any) -> dict[str, Any]:
    """The projection's gradient over that of the median branch, its share of the whole, and the tokens' size."""
    torch.manual_seed(seed)
    vit = ViT(ViTConfig(**SHAPE, **options))
    before = probe(vit, images[:BATCH], labels[:BATCH], light=True)
    taken = take_first_steps(vit, images, labels, adamw, steps=STEPS, batch_size=BATCH)
    return {
        "tokens": before[0].stream,
        "share": (before.projection.weights / taken.norms[0]) ** 2 if before.projection else None,
        "ratio_before": before.projection_ratio,
        "ratio_after": None if taken.after is None else taken.after.projection_ratio,
        "loss": [taken.losses[0], taken.losses[-1]],
    }


def main() -> None:
    """Measure all and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="CIFAR-10 as .npz")
    images, labels = load(parser.parse_args().data)
    rows = []
    for patch in PATCHES:
        for start in STEM_INITS:
            for norm in STEM_NORMS:
                options = {"patch_size": patch, "stem_init": start, "stem_norm": norm}
                found = [measure(images, labels, seed, **options) for seed in range(SEEDS)]
                rows += [{**options, "seed": seed, **row} for seed, row in enumerate(found)]
                print(rows[-1], flush=True)
    text = {"command": "python benchmarks/stem_gradients.py cifar10.npz", "rows": rows}
    (RESULTS / "stem_gradients.json").write_text(json.dumps(text, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
