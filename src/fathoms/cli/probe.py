"""Check signal propagation through the depth before training: one batch forward and backward.

The default model is a deep, narrow ViT for scikit-learn's handwritten digits; larger models get the same digits,
resized. Every model option is a flag.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, field
from typing import Any

from fathoms.cli.parse import Switches, given
from fathoms.errors import FathomsError

EXAMPLES = """
fathoms probe
fathoms probe --depth 96 --residual layerscale
fathoms probe --model cait_s24_224 --norm dyt --batch-size 8 --json
"""


@dataclass(frozen=True)
class Args:
    """Model and batch."""

    model: str = "vit_digits"
    """A name from `fathoms models`."""
    batch_size: int = 64
    """Images in the batch."""
    seed: int = 0
    """Random seed of the weights."""
    json: bool = False
    """Print one JSON object."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    """Build the model, probe it and print the signal."""
    import torch

    from fathoms.data.sources.digits import digits
    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config
    from fathoms.probes.signal import probe

    config = model_config(args.model, **given(args.switches))
    images, labels = digits(config.image_size, config.in_channels)
    if not 1 <= args.batch_size <= len(images):
        raise FathomsError(f"--batch-size {args.batch_size}: use 1 to {len(images)}, the number of digits")
    if config.num_classes < 10:
        raise FathomsError(f"--num-classes {config.num_classes}: the digits have 10 classes; use 10 or more")
    torch.manual_seed(args.seed)
    signal = probe(ViT(config), images[: args.batch_size], labels[: args.batch_size])
    if args.json:
        print(json_format.dumps({"model": args.model, "config": config.to_dict(), **signal.to_json()}))
        return 0
    print(signal.table())
    print(f"\n{describe(args.model, config.depth, signal)}")
    return 0


def describe(model: str, depth: int, signal: Any) -> str:
    """A sentence on growth and gradients."""
    return (
        f"{model}, {depth} blocks: the stream grows by a factor of {signal.growth:.3g}; "
        f"the gradient at the first block is {signal.gradient_ratio:.3g} times that at the last."
    )
