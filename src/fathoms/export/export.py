"""Export a model to a file, verify it against the original, and write its card."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.evaluate.onnx_model import OnnxModel
from fathoms.export.card import write_card
from fathoms.export.onnx import OPSET, write_onnx
from fathoms.export.quantise import Judge, Quantised, quantise
from fathoms.export.verify import verify
from fathoms.files.atomic import replacing
from fathoms.models.build_timm import TIMM, build_timm
from fathoms.models.inference_mode import in_inference
from fathoms.models.timm_names import why_not_timm
from fathoms.models.vit import ViT
from fathoms.models.weights import load_weights, put_weights, read_tensors, save_weights, weights_of
from fathoms.names.registry import check_name
from fathoms.surgery.accelerate.accelerate import accelerate
from fathoms.surgery.fold.fold import fold
from fathoms.surgery.inputs import example_images, image_shape, output_tensors

# The ending of each format.
FORMATS = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors", "timm": ".safetensors"}

Runner = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Args:
        path: The model.
        card: Its card as Markdown; the same as JSON is next to it.
        format: One of `FORMATS`.
        differences: At each batch size, the largest difference from the original over its largest output.
        accelerated: Number of modules replaced by faster ones first; None if that was not requested.
        folded: Number of scales and shifts folded first; None if that was not requested.
        parameters: Number of parameters.
        int8: Size and accuracy before and after int8 quantisation; None if the weights are float32.
    """

    path: str
    card: str
    format: str
    differences: dict[int, float]
    accelerated: int | None
    folded: int | None
    parameters: int
    int8: Quantised | None

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def export_model(  # noqa: PLR0913 - one argument for each flag of the command
    model: nn.Module,
    path: str | Path,
    format: str = "onnx",
    *,
    accelerated: bool = False,
    folded: bool = False,
    opset: int | None = None,
    int8: Judge | None = None,
    name: str = "model",
    about: dict[str, Any] | None = None,
) -> Exported:
    """Write a model to a file, after checking that the file computes the same outputs.

    Args:
        model: A fathoms model, or any model for "onnx" and "torch-export".
        path: The file; its ending must be the format's.
        format: "onnx", "torch-export" (a .pt2 program), "safetensors" or "timm" (timm's parameter names).
        accelerated: Replace attentions of timm's and DeiT's models by faster forms first, in a copy.
        folded: Fold scales and shifts into the matrices first.
        opset: ONNX opset; None for 18.
        int8: Quantise the matrices of an ONNX file to int8, if the accuracy on these images allows it. The
            differences are then those of the file before quantisation.
        name: Name of the model in the card; "timm/NAME" for a timm model.
        about: Further entries of the card, such as the recipe and the metrics of a run.
    """
    path = Path(path)
    _check(path, format, opset, int8)
    subject, modules, parts = model, None, None
    if accelerated:
        subject = copy.deepcopy(model)
        modules = len(accelerate(subject))
    if folded:
        subject, report = fold(subject)
        parts = len(report)
    with in_inference(model), replacing(path) as temporary:
        gaps = verify(model, _write(subject, temporary, format, opset or OPSET, name), f"{format} file")
        quantised = None if int8 is None else _quantise(model, temporary, int8)
    count = sum(parameter.numel() for parameter in subject.parameters())
    entries = {"model": name, "format": format, "parameters": count, "differences": gaps}
    entries |= {"accelerated": modules, "folded": parts}
    entries |= {"input": list(image_shape(model)), "config": _config(subject), **(about or {})}
    if format == "onnx":
        entries |= {"opset": opset or OPSET, "int8": None if quantised is None else quantised.to_json()}
    _, card = write_card(path, entries)
    return Exported(str(path), str(card), format, gaps, modules, parts, count, quantised)


def _config(model: nn.Module) -> dict[str, Any]:
    """The config of a fathoms model; of another model the number of classes, which is all that is known."""
    return model.config.to_dict() if isinstance(model, ViT) else {"num_classes": model.num_classes}


def _check(path: Path, format: str, opset: int | None, int8: Judge | None) -> None:
    check_name(format, FORMATS, "format", "export")
    if path.suffix != FORMATS[format]:
        kind = {"onnx": "an ONNX file", "timm": "a file of weights for timm"}.get(format, f"a {format} file")
        raise FathomsError(f"export: {path.name}: {kind} ends in {FORMATS[format]}; change the name")
    if not path.parent.is_dir():
        raise FathomsError(f"export: {path.parent}: the folder does not exist; create it first")
    for option, value in {"opset": opset, "int8": int8}.items():
        if value is not None and format != "onnx":
            raise FathomsError(f"--{option} is for --format onnx only, not for {format}; leave it out")


def _write(model: nn.Module, path: Path, format: str, opset: int, name: str) -> Runner:
    """Write a model; returns a function that runs the file."""
    if format == "onnx":
        write_onnx(model, path, opset)
        return OnnxModel(path).outputs
    if format == "torch-export":
        return _write_program(model, path)
    return _write_weights(model, path, format) if isinstance(model, ViT) else _write_timm(model, path, name)


def _quantise(model: nn.Module, path: Path, judge: Judge) -> Quantised:
    """Replace an ONNX file by its int8 version."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".int8.") as folder:
        small = Path(folder) / path.name
        result = quantise(model, path, small, judge)
        small.replace(path)
    return result


def _write_program(model: nn.Module, path: Path) -> Runner:
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(
        model, (example_images(model, 2),), dynamic_shapes=({0: batch},), strict=False
    )
    torch.export.save(program, path)
    return _runner(torch.export.load(path).module())


def _write_weights(model: ViT, path: Path, format: str) -> Runner:
    """Write the weights of a fathoms model, and read them back into a new model of the same config."""
    if format == "timm" and (reason := why_not_timm(model.config)):
        raise FathomsError(f"export: {reason}; use --format safetensors")
    twin = ViT(model.config).eval()
    if {name for name, _ in twin.named_parameters()} != {name for name, _ in model.named_parameters()}:
        raise FathomsError(
            f"export: no ViTConfig describes this model, so a {format} file of it could not be loaded; "
            "use onnx or torch-export, or leave --fold out"
        )
    save_weights(model, path, layout="timm" if format == "timm" else "fathoms")
    load_weights(twin, path)
    return _runner(twin)


def _write_timm(model: nn.Module, path: Path, name: str) -> Runner:
    """Write the weights of a timm model under timm's names, and read them back into a new model of its name."""
    state = weights_of(model)
    twin = build_timm(name, _config(model)["num_classes"]).eval() if name.startswith(TIMM) else None
    if twin is None or weights_of(twin).keys() != state.keys():
        raise FathomsError(
            f"export: timm builds no {type(model).__name__} with these weights, so a weights file of it could "
            "not be loaded; use onnx or torch-export, or leave --fold out"
        )
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in state.items()}, path, {"format": "pt"}
    )
    put_weights(twin, read_tensors(path, str(path)), str(path))
    return _runner(twin)


def _runner(module: Callable[[Tensor], Any]) -> Runner:
    @torch.no_grad()
    def run(images: Tensor) -> list[Tensor]:
        return output_tensors(module(images))

    return run
