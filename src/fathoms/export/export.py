"""Write a model for use elsewhere, verified before it gets its name, with a card beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathoms.atomic import replacing
from fathoms.errors import FathomsError
from fathoms.export.card import write_card
from fathoms.export.onnx import OPSET, OnnxModel, write_onnx
from fathoms.export.quantise import Judge, Quantised, quantise
from fathoms.export.verify import verify
from fathoms.models.inference_mode import in_inference
from fathoms.models.vit import ViT
from fathoms.models.weights import load_weights, save_weights
from fathoms.registry import check_name
from fathoms.surgery.fold.fold import fold
from fathoms.surgery.inputs import example_images, image_shape, output_tensors

# The ending of each format.
FORMATS = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors", "timm": ".safetensors"}

Runner = Callable[[Tensor], list[Tensor]]


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
        int8: What eight bits saved and cost; None if the weights are float32.
    """

    path: str
    card: str
    format: str
    differences: dict[int, float]
    folded: int | None
    parameters: int
    int8: Quantised | None

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def export_model(
    model: ViT,
    path: str | Path,
    format: str = "onnx",
    *,
    folded: bool = False,
    opset: int | None = None,
    int8: Judge | None = None,
    name: str = "model",
    about: dict[str, Any] | None = None,
) -> Exported:
    """Write a model to a file, after checking that what was written answers as the model does.

    Args:
        model: What to export.
        path: The file; its ending must be the format's.
        format: "onnx", "torch-export" (a .pt2 program), "safetensors" or "timm" (timm's names).
        folded: Fold scales and shifts into the matrices first.
        opset: ONNX's version; None is 18.
        int8: Round the matrices of an ONNX file to eight bits, if these pictures let that pass. The differences
            are then those of the file before rounding.
        name: What the card calls it.
        about: More for the card, such as the recipe and the metrics of a run.
    """
    path = Path(path)
    _check(path, format, opset, int8)
    subject, parts = model, None
    if folded:
        copy, report = fold(model)
        assert isinstance(copy, ViT)
        subject, parts = copy, len(report)
    with in_inference(model), replacing(path) as temporary:
        gaps = verify(model, _write(subject, temporary, format, opset or OPSET), f"{format} file")
        rounded = None if int8 is None else _round(model, temporary, int8)
    count = sum(parameter.numel() for parameter in subject.parameters())
    told = {"model": name, "format": format, "parameters": count, "differences": gaps, "folded": parts}
    told |= {"input": list(image_shape(model)), "config": subject.config.to_dict(), **(about or {})}
    if format == "onnx":
        told |= {"opset": opset or OPSET, "int8": None if rounded is None else rounded.to_json()}
    _, card = write_card(path, told)
    return Exported(str(path), str(card), format, gaps, parts, count, rounded)


def _check(path: Path, format: str, opset: int | None, int8: Judge | None) -> None:
    check_name(format, FORMATS, "format", "export")
    if path.suffix != FORMATS[format]:
        raise FathomsError(f"export: {path.name}: a {format} file ends in {FORMATS[format]}; change the name")
    if not path.parent.is_dir():
        raise FathomsError(f"export: {path.parent}: the folder does not exist; create it first")
    for option, value in {"opset": opset, "int8": int8}.items():
        if value is not None and format != "onnx":
            raise FathomsError(f"export: {option} is for onnx only, not for {format}; leave it out")


def _write(model: ViT, path: Path, format: str, opset: int) -> Runner:
    """Write a model, and give back what runs the file that was written."""
    if format == "onnx":
        write_onnx(model, path, opset)
        return OnnxModel(path)
    return _write_program(model, path) if format == "torch-export" else _write_weights(model, path, format)


def _round(model: ViT, path: Path, judge: Judge) -> Quantised:
    """Put a file with rounded matrices in the place of one without."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".int8.") as folder:
        rounded = Path(folder) / path.name
        told = quantise(model, path, rounded, judge)
        rounded.replace(path)
    return told


def _write_program(model: ViT, path: Path) -> Runner:
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(
        model, (example_images(model, 2),), dynamic_shapes=({0: batch},), strict=False
    )
    torch.export.save(program, path)
    return _runner(torch.export.load(path).module())


def _write_weights(model: ViT, path: Path, format: str) -> Runner:
    """Write the weights, and read them back into a new model of the same config."""
    twin = ViT(model.config).eval()
    if {name for name, _ in twin.named_parameters()} != {name for name, _ in model.named_parameters()}:
        raise FathomsError(
            f"export: no ViTConfig describes this model, so a {format} file of it could not be loaded; "
            "use onnx or torch-export, or leave --fold out"
        )
    save_weights(model, path, layout="timm" if format == "timm" else "fathoms")
    load_weights(twin, path)
    return _runner(twin)


def _runner(module: Callable[[Tensor], Any]) -> Runner:
    @torch.no_grad()
    def run(images: Tensor) -> list[Tensor]:
        return output_tensors(module(images))

    return run
