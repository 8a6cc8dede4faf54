"""An ONNX file with its matrices in eight bits, and what that costs in accuracy on real data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.errors import FathomsError
from fathoms.evaluate.metrics import FewerChannels, evaluate
from fathoms.export.onnx import OnnxModel
from fathoms.models.vit import ViT


@dataclass(frozen=True)
class Judge:
    """Labelled pictures on which a model is measured before and after.

    Args:
        name: What the data is called.
        batches: Gives the batches anew each time.
        classes: How many classes the data has.
        label_map: The model's output for each class of the data; None if they are the same.
        max_drop: Points of top-1 accuracy that may be lost.
    """

    name: str
    batches: Callable[[], Iterable[Batch]]
    classes: int
    label_map: list[int] | None = None
    max_drop: float = 1.0

    def top1(self, model: nn.Module, channels: int) -> tuple[float, int]:
        """Percent right, and of how many pictures."""
        seen = FewerChannels(model, channels)
        told = evaluate(seen, self.batches(), self.classes, label_map=self.label_map)
        return told.top1, told.images


@dataclass(frozen=True)
class Quantised:
    """What eight bits saved and cost.

    Args:
        data: What it was measured on.
        images: How many pictures.
        top1: Percent right, of the model and of the file in eight bits.
        bytes: Size of the file in float32 and in eight bits.
    """

    data: str
    images: int
    top1: tuple[float, float]
    bytes: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


class _Answers(nn.Module):
    """An ONNX file where a module is expected."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.run = OnnxModel(path)

    def forward(self, images: Tensor) -> Tensor:
        """Its logits."""
        return self.run(images)[0]


def quantise(model: ViT, source: Path, target: Path, judge: Judge) -> Quantised:
    """Write `source`, a verified ONNX file of `model`, with int8 weights, if the judge lets it pass.

    Weights are rounded for each column of a matrix, activations while the model runs: nothing is calibrated.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The shapes that torch noted in between belong to Gemm nodes that the quantiser rewrites; it finds its own.
    graph = onnx.load(source)
    del graph.graph.value_info[:]
    # It advises to run a preparation that the exporter has already done.
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            graph,
            target,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            # Eight bits times eight bits overflow the sums of processors without VNNI; seven times eight do not.
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        root.setLevel(level)
    channels = model.config.in_channels
    before, images = judge.top1(model, channels)
    after, _ = judge.top1(_Answers(target), channels)
    if not before - after <= judge.max_drop:
        raise FathomsError(
            f"export: int8 takes top1 on {judge.name} from {before:.2f} to {after:.2f}, more than "
            f"{judge.max_drop:g} points; nothing was written, raise --max-drop or leave --int8 out"
        )
    return Quantised(judge.name, images, (before, after), (source.stat().st_size, target.stat().st_size))
