"""Export a model (ONNX, int8 ONNX, torch.export, weights): verified against the original, with a card, to the Hub."""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.errors import FathomsError, reason
from fathoms.evaluating.metrics import FewerChannels, evaluate
from fathoms.evaluating.onnx_model import OnnxModel, need
from fathoms.exporting.card import instead_of_weights, write_card
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


@dataclass(frozen=True)
class Judge:
    """Labelled images on which accuracy is measured before and after quantisation.

    Args:
        name: Name of the data.
        batches: Returns the batches, from the first, on each call.
        classes: Number of classes of the data.
        label_map: The model's output for each class of the data; None if they are the same.
        max_drop: Largest accepted loss of top-1 accuracy, in percentage points.
    """

    name: str
    batches: Callable[[], Iterable[Batch]]
    classes: int
    label_map: list[int] | None = None
    max_drop: float = 1.0

    def top1(self, model: nn.Module, channels: int) -> tuple[float, int]:
        """Top-1 accuracy in percent, and the number of images."""
        result = evaluate(
            FewerChannels(model, channels), self.batches(), self.classes, label_map=self.label_map
        )
        return result.top1, result.images


@dataclass(frozen=True)
class Quantised:
    """Size and accuracy before and after int8 quantisation.

    Args:
        data: Name of the data that it was measured on.
        images: Number of images.
        top1: Top-1 accuracy in percent, of the float32 model and of the int8 file.
        bytes: Size of the file in float32 and in int8.
    """

    data: str
    images: int
    top1: tuple[float, float]
    bytes: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def quantise(model: nn.Module, source: Path, target: Path, judge: Judge) -> Quantised:
    """Write `source`, a verified ONNX file of `model`, with int8 weights, unless that costs too much accuracy.

    Weights are quantised per column of a matrix, activations dynamically: nothing is calibrated.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # torch's intermediate shapes belong to Gemm nodes that the quantiser rewrites; it infers its own.
    graph = onnx.load(source)
    del graph.graph.value_info[:]
    # It recommends a preprocessing step that the exporter has already done.
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            graph,
            target,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            # 8-bit times 8-bit products overflow the sums of CPUs without VNNI; 7-bit times 8-bit ones do not.
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        root.setLevel(level)
    channels = image_shape(model)[0]
    before, images = judge.top1(model, channels)
    after, _ = judge.top1(OnnxModel(target), channels)
    if not before - after <= judge.max_drop:
        raise FathomsError(
            f"export: int8 takes top1 on {judge.name} from {before:.2f} to {after:.2f}, more than "
            f"{judge.max_drop:g} points; nothing was written, raise --max-drop or leave --int8 out"
        )
    return Quantised(judge.name, images, (before, after), (source.stat().st_size, target.stat().st_size))


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


# Metadata that the Hub reads from the top of a card, for its search and its code snippets.
_HEAD = "---\nlibrary_name: fathoms\npipeline_tag: image-classification\ntags:\n- vision-transformer\n---\n\n"


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
    name = f"model{path.suffix}"
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder) / "README.md"
        write_atomic(readme, (_HEAD + Path(exported.card).read_text()).encode())
        files = {name: path, f"{name}.json": path.with_name(f"{path.name}.json"), "README.md": readme}
        return model_sources.push(repo, files, public=public)
