"""int8 versions of an ONNX file: dynamic or calibrated, with the layers that int8 harms most left in float32."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.errors import FathomsError
from fathoms.evaluating.metrics import FewerChannels, evaluate
from fathoms.surgery.inputs import image_shape

CALIBRATION = 128
"""Images that fix the ranges of activations; the ranges hardly move after the first dozens."""


@dataclass(frozen=True)
class Judge:
    """Labelled images on which accuracy is measured before and after quantisation.

    Args:
        name: Name of the data.
        batches: Returns the batches, from the first, on each call.
        classes: Number of classes of the data.
        label_map: The model's output for each class of the data; None if they are the same.
        max_drop: Largest accepted loss of top-1 accuracy, in percentage points.
        calibration: Returns batches of other images, which fix the ranges of activations (static int8); None measures
            the ranges at run time (dynamic int8).
    """

    name: str
    batches: Callable[[], Iterable[Batch]]
    classes: int
    label_map: list[int] | None = None
    max_drop: float = 1.0
    calibration: Callable[[], Iterable[Batch]] | None = None

    def top1(self, model: nn.Module, channels: int) -> tuple[float, int]:
        """Top-1 accuracy in percent, and the number of images."""
        seen = FewerChannels(model, channels)
        result = evaluate(seen, self.batches(), self.classes, label_map=self.label_map)
        return result.top1, result.images

    def images(self, channels: int, count: int) -> Tensor:
        """The first images, as the model takes them."""
        return _first(self.batches(), channels, count)

    def examples(self, channels: int) -> Tensor | None:
        """Images for calibration, or None."""
        return None if self.calibration is None else _first(self.calibration(), channels, CALIBRATION)


def _first(batches: Iterable[Batch], channels: int, count: int) -> Tensor:
    found: list[Tensor] = []
    for batch in batches:
        found.append(batch.images[:, :channels].float().cpu())
        if sum(map(len, found)) >= count:
            break
    return torch.cat(found)[:count]


@dataclass(frozen=True)
class Quantised:
    """Size and accuracy before and after int8 quantisation.

    Args:
        data: Name of the data that it was measured on.
        images: Number of images.
        top1: Top-1 accuracy in percent, of the float32 model and of the int8 file.
        bytes: Size of the file in float32 and in int8.
        kept: Why layers stayed in float32, one sentence each.
    """

    data: str
    images: int
    top1: tuple[float, float]
    bytes: tuple[int, int]
    kept: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def quantise(
    model: nn.Module, source: Path, target: Path, judge: Judge, opened: Callable[[], nn.Module]
) -> Quantised:
    """Write `source`, an ONNX file of `model`, with int8 matrices, unless that costs too much accuracy.

    Where it does, the patch projection stays in float32, and then one MLP output after the other, that with the largest
    outliers first.

    Args:
        model: The model.
        source: Its verified ONNX file.
        target: The int8 ONNX file.
        judge: Images and the largest loss.
        opened: Gives the file `target` as a model, in the runtime that will run it.
    """
    import onnx

    channels = image_shape(model)[0]
    graph = onnx.load(source)
    # torch's intermediate shapes belong to Gemm nodes that the quantiser rewrites; it infers its own.
    del graph.graph.value_info[:]
    (before, images), examples = judge.top1(model, channels), judge.examples(channels)
    fragile: Iterator[tuple[str, str]] | None = None
    left: dict[str, str] = {}
    while True:
        write_int8(graph, target, examples, list(left))
        after, _ = judge.top1(opened(), channels)
        if before - after <= judge.max_drop:
            sizes = (source.stat().st_size, target.stat().st_size)
            return Quantised(judge.name, images, (before, after), sizes, tuple(left.values()))
        fragile = fragile or iter(_fragile(graph, judge.images(channels, 16)))
        layer = next(fragile, None)
        if layer is None:
            raise FathomsError(
                f"export: int8 takes top1 on {judge.name} from {before:.2f} to {after:.2f}, more than "
                f"{judge.max_drop:g} points; nothing was written, raise --max-drop or leave --int8 out"
            )
        left[layer[0]] = (
            f"{layer[1]} stays float32: top1 fell from {before:.2f} to {after:.2f} with it in int8"
        )


def write_int8(graph: Any, target: Path, examples: Tensor | None, left: list[str]) -> None:
    """Write an ONNX graph with int8 matrices; `examples` fix the ranges of activations, None leaves them to run time.

    Args:
        graph: The model that `onnx.load` gives.
        target: The file.
        examples: Images for calibration.
        left: Names of the nodes that stay in float32.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static

    options: dict[str, Any] = {
        "op_types_to_quantize": ["MatMul", "Gemm"],
        "per_channel": True,
        # 8-bit times 8-bit products overflow the sums of CPUs without VNNI; 7-bit times 8-bit ones do not.
        "reduce_range": True,
        "weight_type": QuantType.QInt8,
        "nodes_to_exclude": left,
        # Products of two activations, which attention has, are left in float32.
        "extra_options": {"MatMulConstBOnly": True},
    }
    # The quantiser changes what it is given.
    graph = copy.deepcopy(graph)
    with _quiet():
        if examples is None:
            quantize_dynamic(graph, target, **options)
            return

        class Reader(CalibrationDataReader):
            def __init__(self) -> None:
                self.rest = iter(examples.numpy())

            def get_next(self) -> Any:
                image = next(self.rest, None)
                return None if image is None else {graph.graph.input[0].name: image[None]}

        quantize_static(graph, target, Reader(), **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantiser recommends a preprocessing step that the exporter has already done."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def _fragile(graph: Any, images: Tensor) -> list[tuple[str, str]]:
    """Nodes that int8 may harm and their names for people: the patch projection, then MLP outputs by their outliers.

    An MLP output is a product whose constant matrix has more rows than columns; the classifier is the last product.
    """
    import onnx
    import onnxruntime

    shapes = {tensor.name: list(tensor.dims) for tensor in graph.graph.initializer}
    products = [n for n in graph.graph.node if n.op_type in ("MatMul", "Gemm") and n.input[1] in shapes]
    convolved = any(node.op_type == "Conv" for node in graph.graph.node)
    found = [] if convolved else [(products[0].name, "the patch projection")]
    inner = [n for n in products[:-1] if n.op_type == "MatMul" and (s := shapes[n.input[1]])[0] > s[1]]
    inner = [node for node in inner if node.name not in dict(found)]
    if not inner:
        return found
    shown = copy.deepcopy(graph)
    wanted = list(dict.fromkeys(node.input[0] for node in inner))
    shown.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in wanted
    )
    session = onnxruntime.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    values: list[Any] = list(session.run(wanted, {session.get_inputs()[0].name: images.numpy()}))
    reach = {
        name: float(abs(v).max() / np.sqrt((v**2).mean())) for name, v in zip(wanted, values, strict=True)
    }
    ranked = sorted(enumerate(inner, 1), key=lambda pair: -reach[pair[1].input[0]])
    return found + [
        (
            node.name,
            f"MLP output {place} of {len(inner)}, whose input reaches {reach[node.input[0]]:.0f} times its RMS,",
        )
        for place, node in ranked
    ]
