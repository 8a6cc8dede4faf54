"""Quantise an ONNX file to int8, and measure the accuracy before and after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fathoms.data import Batch
from fathoms.errors import FathomsError
from fathoms.evaluate.metrics import FewerChannels, evaluate
from fathoms.evaluate.onnx_model import OnnxModel
from fathoms.surgery.inputs import image_shape


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
