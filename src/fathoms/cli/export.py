"""Write a model for use elsewhere: ONNX, torch.export, safetensors or timm's names.

The batch stays free. What was written is run at batch 1 and 5 and compared with the original before it gets
its name; a card lies beside it.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from fathoms.cli.parse import Switches, given
from fathoms.errors import printable

EXAMPLES = """
fathoms export weights.safetensors --model cait_xxs24_224
fathoms export weights.safetensors --model vit_scaler_192x24_16 --fold --output model.onnx
fathoms export weights.safetensors --model deit3_small_patch16_224 --format torch-export --json
"""


@dataclass(frozen=True)
class Args:
    """What to export, and as what."""

    checkpoint: tyro.conf.Positional[Path]
    """A weights file (.safetensors)."""
    model: str
    """The model they belong to: a name from `fathoms models`."""
    format: Literal["onnx", "torch-export", "safetensors", "timm"] = "onnx"
    """What to write."""
    output: Path | None = None
    """Where to; by default the checkpoint's name with the ending of the format."""
    fold: bool = False
    """Fold scales and shifts into the matrices first."""
    opset: int = 18
    """Version of ONNX's operators."""
    json: bool = False
    """Print one JSON object."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    """Build, load, export, and print the differences."""
    from fathoms.errors import FathomsError
    from fathoms.export.export import FORMATS, export_model
    from fathoms.models.header import build_for
    from fathoms.models.weights import load_weights
    from fathoms.models.zoo import model_config

    model = build_for(model_config(args.model, **given(args.switches)), args.checkpoint)
    source = load_weights(model, args.checkpoint)
    target = args.output or args.checkpoint.with_suffix(FORMATS[args.format])
    if target.resolve() == args.checkpoint.resolve():
        raise FathomsError(f"{target}: this would overwrite the checkpoint; give another --output")
    options = {"folded": args.fold, "opset": args.opset, "name": args.model}
    told = export_model(model, target, args.format, **options, about={"weights": source.source})  # pyrefly: ignore
    if args.json:
        print(json_format.dumps({"model": args.model, **told.to_json()}))
        return 0
    if told.folded is not None:
        print(f"{told.folded} scales and shifts folded")
    for batch, gap in told.differences.items():
        print(f"batch {batch}: differs by {gap:.2g} of the largest output")
    print(printable(f"written to {told.path}, card in {told.card}"))
    return 0
