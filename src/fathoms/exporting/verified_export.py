"""Export a model (ONNX, OpenVINO, torch.export, weights): verified against the original, with a card, to the Hub."""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fathoms.errors import FathomsError, reason
from fathoms.evaluating.onnx_model import RUNTIMES, RuntimeModel, need
from fathoms.exporting.card import card_files, hub_page, instead_of_weights, write_card
from fathoms.exporting.int8 import Judge, Quantised, quantise
from fathoms.exporting.timm_config import write_timm_config
from fathoms.files import replacing, write_atomic
from fathoms.models import model_sources
from fathoms.models.build_timm import TIMM, build_timm
from fathoms.models.vit import ViT
from fathoms.models.weight_names import why_not_timm
from fathoms.models.weights import load_weights, put_weights, read_tensors, save_weights, weights_of
from fathoms.parts.modes import in_inference
from fathoms.registry import check_name
from fathoms.surgery.accelerate import accelerate
from fathoms.surgery.fold import fold
from fathoms.surgery.inputs import difference, example_images, image_shape, output_tensors, run
from fathoms.untrusted import sha256_of

# The ending of each format.
FORMATS = {
    "onnx": ".onnx",
    "openvino": ".xml",
    "torch-export": ".pt2",
    "safetensors": ".safetensors",
    "timm": ".safetensors",
}

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
        notes: Lines for the user, such as why a file was not written.
    """

    path: str
    card: str
    format: str
    differences: dict[int, float]
    accelerated: int | None
    folded: int | None
    parameters: int
    int8: Quantised | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
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
    graph: Path | None = None,
) -> Exported:
    """Write a model to a file, after checking that the file computes the same outputs.

    Args:
        model: A fathoms model, or any model for "onnx", "openvino" and "torch-export".
        path: The file; its ending must be the format's.
        format: "onnx", "openvino" (model.xml with its weights in model.bin), "torch-export" (a .pt2 program),
            "safetensors" or "timm" (timm's parameter names, and its config.json).
        accelerated: Replace attentions of timm's and DeiT's models by faster forms first, in a copy.
        folded: Fold scales and shifts into the matrices first.
        opset: ONNX opset; None for 18.
        int8: Quantise the matrices of an ONNX or OpenVINO file to int8, if the accuracy on these images allows it. The
            differences are then those of the file before quantisation.
        name: Name of the model in the card; "timm/NAME" for a timm model.
        about: Further entries of the card, such as the recipe and the metrics of a run.
        graph: Where its ONNX file is kept for other calls with this model, prepared alike.
    """
    path = Path(path)
    _check(path, format, opset, int8)
    for key, value in model.named_parameters():
        if value.is_meta or (format == "onnx" and value.dtype != torch.float32):
            held = "no values" if value.is_meta else f"{str(value.dtype).removeprefix('torch.')} values"
            raise FathomsError(
                f"export: {key} holds {held}; export a model with float32 weights, model.float()"
            )
    subject, modules, parts = model, None, None
    if accelerated:
        subject = copy.deepcopy(model)
        modules = len(accelerate(subject))
    if folded:
        subject, report = fold(subject)
        parts = len(report)
    notes: tuple[str, ...] = ()
    with (
        in_inference(model),
        tempfile.TemporaryDirectory() as scratch,
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".export.") as folder,
    ):
        draft, graph = Path(folder) / path.name, graph or Path(scratch) / "model.onnx"
        if format in GRAPHS and not graph.exists():
            write_onnx(subject, graph, opset or OPSET)
        runner = (
            open_graph(graph, draft).outputs if format in GRAPHS else _write(subject, draft, format, name)
        )
        gaps = verify(model, runner, f"{format} file")
        quantised = None if int8 is None else _quantise(model, graph, draft, int8)
        if format == "timm":
            notes = write_timm_config(subject, draft, name, about or {})
        for file in sorted(draft.parent.iterdir()):
            with replacing(path.parent / file.name) as temporary:
                file.replace(temporary)
    count = sum(parameter.numel() for parameter in subject.parameters())
    entries = {"model": name, "format": format, "parameters": count, "differences": gaps}
    entries |= {"accelerated": modules, "folded": parts}
    entries |= {"input": list(image_shape(model)), "config": _config(subject), **(about or {})}
    if format in GRAPHS:
        entries |= {"opset": opset or OPSET, "int8": None if quantised is None else quantised.to_json()}
    if format == "openvino":
        entries["weights_sha256"] = sha256_of(path.with_suffix(".bin"))
    _, card = write_card(path, entries)
    return Exported(str(path), str(card), format, gaps, modules, parts, count, quantised, notes)


GRAPHS = ("onnx", "openvino")
"""Formats that are made of an ONNX graph."""


def files_of(path: Path, format: str) -> list[Path]:
    """Every file that an export writes, its cards among them."""
    beside = {"openvino": [path.with_suffix(".bin")], "timm": [path.parent / "config.json"]}
    return [path, *beside.get(format, []), *card_files(path)]


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
        if value is not None and format not in GRAPHS:
            raise FathomsError(
                f"--{option} is for --format onnx and openvino, not for {format}; leave it out"
            )
    if format == "openvino":
        need("openvino", "export --format openvino")
        if int8 is not None and int8.calibration is None:
            raise FathomsError(
                "--int8: OpenVINO fixes the ranges of activations in advance; give images with --calibrate DATA"
            )


def _write(model: nn.Module, path: Path, format: str, name: str) -> Runner:
    """Write a model without ONNX; returns a function that runs the file."""
    if format == "torch-export":
        return _write_program(model, path)
    return _write_weights(model, path, format) if isinstance(model, ViT) else _write_timm(model, path, name)


def open_graph(source: Path, path: Path) -> RuntimeModel:
    """Write an ONNX file as `path`, which may be OpenVINO's model.xml, and open that."""
    if path.suffix == ".xml":
        import openvino

        openvino.save_model(openvino.Core().read_model(source), path, compress_to_fp16=False)
    else:
        shutil.copyfile(source, path)
    return RUNTIMES[path.suffix](path)


def _quantise(model: nn.Module, graph: Path, draft: Path, judge: Judge) -> Quantised:
    """Replace a verified draft by its int8 version."""
    before = _size(draft)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.onnx"
        found = quantise(model, graph, small, judge, lambda: open_graph(small, draft))
    return replace(found, bytes=(before, _size(draft)))


def _size(draft: Path) -> int:
    return sum(file.stat().st_size for file in draft.parent.iterdir())


def _write_program(model: nn.Module, path: Path) -> Runner:
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(
        model, (example_images(model, 2),), dynamic_shapes=({0: batch},), strict=False
    )
    # Lines of source with the folders of this machine.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
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
            f"{instead_of_weights(model, twin)}"
        )
    save_weights(model, path, layout="timm" if format == "timm" else "fathoms")
    load_weights(twin, read_tensors(path, str(path)))
    return _runner(twin)


def _write_timm(model: nn.Module, path: Path, name: str) -> Runner:
    """Write the weights of a timm model under timm's names, and read them back into a new model of its name."""
    state = weights_of(model)
    twin = build_timm(name, _config(model)["num_classes"]).eval() if name.startswith(TIMM) else None
    if twin is None or weights_of(twin).keys() != state.keys():
        raise FathomsError(
            f"export: timm builds no {type(model).__name__} with these weights, so a weights file of it could "
            f"not be loaded; {instead_of_weights(model, twin)}"
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


# The first opset in which every operation of a Vision Transformer, layer norms included, is ONNX's own.
OPSET = 18
OPSETS = range(OPSET, 24)


def write_onnx(model: nn.Module, path: Path, opset: int = OPSET) -> None:
    """Write a model as one ONNX file for inference: input "images" with any batch size, output "logits"."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "export")
    import onnx

    if opset not in OPSETS:
        raise FathomsError(f"--opset {opset} is not supported; use {OPSETS[0]} to {OPSETS[-1]}")
    batch = torch.export.Dim("batch", min=1, max=4096)
    noisy = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx")]
    levels = [logger.level for logger in noisy]
    try:
        for logger in noisy:
            logger.setLevel(logging.ERROR)
        # The exporter's own deprecation warnings are not for its users.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (example_images(model, 2),),
                path,
                input_names=["images"],
                output_names=["logits"],
                opset_version=opset,
                dynamo=True,
                dynamic_shapes=({0: batch},),
                external_data=False,
                verbose=False,
            )
        written = onnx.load_model(path)
        _forget_origin(written)
        onnx.save_model(written, path)
    except torch.onnx.errors.OnnxExporterError as error:
        # The exporter reports its own stages first; the actual failure is the last cause of the chain.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise FathomsError(
            f"export: torch cannot write {type(model).__name__} as ONNX ({reason(cause)}); "
            "try --format torch-export"
        ) from error
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


def _forget_origin(message: Any) -> None:
    """Clear what torch notes of where each node comes from: stack traces with the folders of this machine."""
    for name in ("metadata_props", "doc_string"):
        if name in message.DESCRIPTOR.fields_by_name:
            message.ClearField(name)
    for kind, value in message.ListFields():
        if kind.message_type is not None:
            for each in value if isinstance(value, Iterable) else [value]:
                _forget_origin(each)


BATCHES = (1, 5)

# Another runtime sums in another order; a larger share of the largest output is not rounding.
TOLERANCE = 1e-4


def verify(model: nn.Module, exported: Callable[[Tensor], list[Tensor]], what: str) -> dict[int, float]:
    """The largest difference over the largest output, by batch size; above the tolerance it is an error."""
    gaps = {}
    for batch in BATCHES:
        images = example_images(model, batch, seed=batch)
        gaps[batch] = difference(run(model, images), exported(images))
    worst = max(gaps.values())
    if not worst <= TOLERANCE:
        raise FathomsError(
            f"export: the {what} differs by {worst:.2g} of the largest output, more than {TOLERANCE:g}; "
            "nothing was written, please report this model"
        )
    return gaps


def publish(exported: Exported, repo: str, *, public: bool = False) -> str:
    """Push an exported model; returns hf-hub:OWNER/NAME@COMMIT, which loads it again.

    The file is called `model` there with the ending of its format, so that a safetensors file is what
    `load_run`, `create_model(weights=...)` and `--checkpoint hf-hub:OWNER/NAME` look for.

    Args:
        exported: The local files.
        repo: OWNER/NAME; created if it does not exist.
        public: Whether a newly created repository is public.
    """
    path = Path(exported.path)
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder) / "README.md"
        write_atomic(readme, hub_page(path, exported.format).encode())
        files = {
            file.name.replace(path.stem, "model", 1) if file.stem != "config" else file.name: file
            for file in files_of(path, exported.format)
            if file.is_file() and file.suffix != ".md"
        }
        return model_sources.push(repo, {**files, "README.md": readme}, public=public)
