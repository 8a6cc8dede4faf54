"""Write a model for use elsewhere, verified before it gets its name, with a card beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathoms.atomic import replacing
from fathoms.errors import FathomsError
from fathoms.export.card import write_card
from fathoms.export.onnx import OnnxModel, write_onnx
from fathoms.export.verify import verify
from fathoms.models.vit import ViT
from fathoms.models.weights import load_weights, save_weights
from fathoms.registry import check_name
from fathoms.surgery.batches import answers, example_images, image_shape
from fathoms.surgery.fold import fold

# The ending of each format.
FORMATS = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors", "timm": ".safetensors"}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: The model.
        card: The card beside it, as Markdown; the same as JSON lies there too.
        format: One of `FORMATS`.
        differences: At each batch size, the largest difference from the original over its largest output.
        folded: How many scales and shifts were folded first; None if that was not asked for.
        parameters: How many numbers it holds.
    """

    path: str
    card: str
    format: str
    differences: dict[int, float]
    folded: int | None
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def export_model(
    model: ViT,
    path: str | Path,
    format: str = "onnx",
    *,
    folded: bool = False,
    opset: int = 18,
    name: str = "model",
    about: dict[str, Any] | None = None,
) -> Exported:
    """Write a model to a file, after checking that what was written answers as the model does.

    Args:
        model: What to export.
        path: The file; its ending must be the format's.
        format: "onnx", "torch-export" (a .pt2 program), "safetensors" or "timm" (timm's names).
        folded: Fold scales and shifts into the matrices first.
        opset: ONNX's version.
        name: What the card calls it.
        about: More for the card, such as the recipe and the metrics of a run.
    """
    path = Path(path)
    check_name(format, FORMATS, "format", "export")
    if path.suffix != FORMATS[format]:
        raise FathomsError(f"export: {path.name}: a {format} file ends in {FORMATS[format]}; change the name")
    if not path.parent.is_dir():
        raise FathomsError(f"export: {path.parent}: the folder does not exist; create it first")
    subject, parts = model.eval(), None
    if folded:
        copy, report = fold(model)
        assert isinstance(copy, ViT)
        subject, parts = copy, len(report)
    with replacing(path) as temporary:
        if format == "onnx":
            write_onnx(subject, temporary, opset)
            exported = OnnxModel(temporary)
        elif format == "torch-export":
            exported = _write_program(subject, temporary)
        else:
            exported = _write_weights(subject, temporary, format)
        gaps = verify(model, exported, f"{format} file")
    count = sum(parameter.numel() for parameter in subject.parameters())
    told = {"model": name, "format": format, "parameters": count, "differences": gaps, "folded": parts}
    told |= {"input": list(image_shape(model)), "config": subject.config.to_dict(), **(about or {})}
    if format == "onnx":
        told["opset"] = opset
    _, card = write_card(path, told)
    return Exported(str(path), str(card), format, gaps, parts, count)


def _write_program(model: ViT, path: Path) -> Any:
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(
        model, (example_images(model, 2),), dynamic_shapes=({0: batch},), strict=False
    )
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()

    @torch.no_grad()
    def run(images: Tensor) -> list[Tensor]:
        return answers(loaded(images))

    return run


def _write_weights(model: ViT, path: Path, format: str) -> Any:
    """Write the weights, and read them back into a new model of the same config."""
    twin = ViT(model.config).eval()
    if {name for name, _ in twin.named_parameters()} != {name for name, _ in model.named_parameters()}:
        raise FathomsError(
            f"export: no ViTConfig describes this folded model, so a {format} file of it could not be loaded; "
            "use onnx or torch-export, or leave --fold out"
        )
    save_weights(model, path, layout="timm" if format == "timm" else "fathoms")
    load_weights(twin, path)

    @torch.no_grad()
    def run(images: Tensor) -> list[Tensor]:
        return answers(twin(images))

    return run
