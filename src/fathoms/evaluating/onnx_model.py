"""An exported file as a model, with the card next to it: onnxruntime or OpenVINO on the CPU."""

from __future__ import annotations

import importlib.util
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError, WeightsError, reason
from fathoms.models.training_record import TrainingRecord, record_of_card
from fathoms.models.weights_file import check_recorded_hash
from fathoms.text_table import plural
from fathoms.untrusted import read_json, read_plain, sha256_of

# protobuf's own limit on one file; a larger model keeps its weights in other files, which are not read.
_MAX_FILE = 2 << 30


def need(package: str, what: str) -> None:
    """Refuse what needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        extra = "openvino" if package == "openvino" else "onnx"
        raise FathomsError(f"{what}: {package} is not installed; pip install 'fathoms[{extra}]'")


# Sides and channels of images that a file may ask for, and values of one image.
_MAX_SIDE, _MAX_VALUES = 8192, 1 << 27
FLOAT, LOGITS = "tensor(float)", "float32 logits (B, classes)"
Entries = list[tuple[str, str, list[Any]]]
"""Name, type and shape of each input or output."""
SECONDS, SECONDS_AN_IMAGE = 60.0, 10.0
"""A run may take this long and as much again for each image: a loop in a graph need not end."""


class RuntimeModel(nn.Module, ABC):
    """An image classifier that another library runs: images (B, C, H, W) in, logits out.

    It is tried on one image before anything is asked of it.

    Args:
        path: The exported file.
        threads: Threads of the CPU; None for those of torch.
    """

    kind: ClassVar[str]
    in_chans: int
    img_size: tuple[int, int]
    num_classes: int

    def __init__(self, path: Path, threads: int | None = None) -> None:
        super().__init__()
        self.path = path
        try:
            self._open(threads or torch.get_num_threads())
        except FathomsError:
            raise
        # Each library raises classes of its own that have no common base.
        except Exception as error:
            raise WeightsError(
                f"{path}: not a readable {self.kind} file ({reason(error)}); export it again"
            ) from error

    @abstractmethod
    def _open(self, threads: int) -> None:
        """Read the file, and tell `_settle` what it takes and gives."""

    @abstractmethod
    def _call(self, batch: np.ndarray, limit: float) -> list[Any] | None:
        """The outputs for a batch; None where it takes more than `limit` seconds."""

    def _settle(self, inputs: Entries, outputs: Entries) -> None:
        """Refuse what is no classifier of float32 images, by its inputs and outputs."""
        kind, shape = inputs[0][1:] if len(inputs) == 1 else ("", [])
        sides = [side for side in shape[1:] if isinstance(side, int) and 0 < side <= _MAX_SIDE]
        if (
            kind != FLOAT
            or len(shape) != 4
            or len(sides) != 3
            or math.prod(sides) > _MAX_VALUES
            or shape[0] == 0
        ):
            raise self._misfit("takes", inputs, "float32 images (B, C, H, W) of one size")
        # The batch that the file is exported for; 0 where it takes any.
        self._batch = shape[0] if isinstance(shape[0], int) else 0
        logits = outputs[0][2] if outputs[0][1] == FLOAT else []
        self._outputs = outputs
        self.in_chans, self.img_size = sides[0], (sides[1], sides[2])
        found = self.outputs(torch.zeros(1, *sides))[0].shape
        if len(logits) != 2 or not isinstance(logits[1], int) or found != (1, logits[1]):
            raise self._misfit("gives", outputs, LOGITS)
        self.num_classes = logits[1]

    def _misfit(self, verb: str, shown: Entries, wanted: str) -> WeightsError:
        return WeightsError(f"{self.path}: {verb} {shown}, not {wanted}; export it with `fathoms export`")

    def outputs(self, images: Tensor) -> list[Tensor]:
        """All outputs for a batch of images."""
        batch = images.detach().float().cpu().numpy()
        size = self._batch or len(batch)
        # The last batch of a file that takes one size only is filled with copies.
        filled = np.concatenate([batch, np.repeat(batch[-1:], -len(batch) % size, axis=0)])
        found = [self._run(piece) for piece in np.split(filled, len(filled) // size)]
        whole = [np.concatenate(each)[: len(batch)] for each in zip(*found, strict=True)]
        return [torch.from_numpy(each).to(images.device) for each in whole]

    def _run(self, batch: np.ndarray) -> list[np.ndarray]:
        limit = SECONDS + SECONDS_AN_IMAGE * len(batch)
        try:
            found = self._call(batch, limit)
        except Exception as error:
            raise WeightsError(f"{self.path}: cannot be run ({reason(error)}); export it again") from error
        images = plural(len(batch), "image")
        if found is None:
            raise WeightsError(
                f"{self.path}: cannot be run (more than {limit:.0f} s for {images}); export it again"
            )
        if not all(isinstance(each, np.ndarray) and each.dtype == np.float32 for each in found):
            raise self._misfit("gives", self._outputs, LOGITS)
        if any(each.ndim < 1 or len(each) != len(batch) for each in found):
            raise WeightsError(
                f"{self.path}: gives {[each.shape for each in found]} for {images}, not a row each; "
                "export it with `fathoms export`"
            )
        if not all(np.isfinite(each).all() for each in found):
            raise WeightsError(
                f"{self.path}: gives values that are not finite; its weights are lost, export it again"
            )
        return found

    def forward(self, images: Tensor) -> Tensor:
        return self.outputs(images)[0]


class OnnxModel(RuntimeModel):
    """An ONNX file in onnxruntime: it refers to no other file, and has no operators but onnxruntime's own."""

    kind = "ONNX"

    def _open(self, threads: int) -> None:
        for package in ("onnx", "onnxruntime"):
            need(package, str(self.path))
        import onnx
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        data = read_plain(self.path, _MAX_FILE)
        # Opening a session opens the other files too.
        if (elsewhere := _stored_elsewhere(onnx.load_model_from_string(data))) is not None:
            raise WeightsError(
                f"{self.path}: keeps {elsewhere[:80]!r} in another file, which is not opened; export it as one file"
            )
        self.session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        sides = (self.session.get_inputs(), self.session.get_outputs())
        inputs, outputs = ([(each.name, each.type, each.shape) for each in side] for side in sides)
        self.input_name = inputs[0][0] if inputs else ""
        self._settle(inputs, outputs)

    def _call(self, batch: np.ndarray, limit: float) -> list[Any] | None:
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.log_severity_level = 4
        timer = threading.Timer(limit, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            return list(self.session.run(None, {self.input_name: batch}, options))
        except Exception:
            if options.terminate:
                return None
            raise
        finally:
            timer.cancel()


class OpenVinoModel(RuntimeModel):
    """OpenVINO's model.xml, whose weights are in model.bin beside it; both are read from memory."""

    kind = "OpenVINO"

    def _open(self, threads: int) -> None:
        need("openvino", str(self.path))
        import openvino

        weights = self.path.with_suffix(".bin")
        card = self.path.with_name(f"{self.path.name}.json")
        wanted = read_json(card, WeightsError).get("weights_sha256") if card.is_file() else None
        if wanted is not None and sha256_of(weights) != wanted:
            raise WeightsError(f"{weights}: is not what {card.name} recorded; copy both files again")
        core = openvino.Core()
        graph = core.read_model(read_plain(self.path, _MAX_FILE), read_plain(weights, _MAX_FILE))
        # Its default rounds to bfloat16 on CPUs that have it.
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.request = core.compile_model(
            graph, "CPU", {**options, "INFERENCE_PRECISION_HINT": "f32"}
        ).create_infer_request()
        self._settle(*([_entry(port) for port in side] for side in (graph.inputs, graph.outputs)))

    def _call(self, batch: np.ndarray, limit: float) -> list[Any] | None:
        self.request.start_async([batch])
        if not self.request.wait_for(int(1000 * limit)):
            self.request.cancel()
            return None
        return [self.request.get_output_tensor(i).data.copy() for i in range(len(self._outputs))]


def _entry(port: Any) -> tuple[str, str, list[Any]]:
    """Name, type and shape of an input or an output of OpenVINO, in onnxruntime's words."""
    shape = [side.get_length() if side.is_static else "?" for side in port.partial_shape]
    kind = FLOAT if port.element_type.to_string() == "f32" else port.element_type.to_string()
    return port.any_name, kind, shape


RUNTIMES: dict[str, type[RuntimeModel]] = {".onnx": OnnxModel, ".xml": OpenVinoModel}
"""The model of an exported file, by its ending."""


def _stored_elsewhere(message: Any) -> str | None:
    """The name of a tensor whose values are in another file, wherever in a protobuf message it is; else None."""
    if message.DESCRIPTOR.name == "TensorProto":
        return (message.name or "a constant") if message.data_location or message.external_data else None
    for kind, value in message.ListFields():
        if kind.message_type is not None:
            for each in value if isinstance(value, Iterable) else [value]:
                if (name := _stored_elsewhere(each)) is not None:
                    return name
    return None


def file_of_card(checkpoint: str) -> str:
    """The weights or exported file that a card (FILE.json) belongs to; anything but a card as it is."""
    file = Path(checkpoint.removesuffix(".json"))
    # Unlike Path's own methods, this is false for a name too long to exist.
    is_card = checkpoint.endswith(".json") and os.path.isfile(checkpoint)  # noqa: PTH113
    if not is_card or file.suffix not in (".safetensors", *RUNTIMES):
        return checkpoint
    if not file.is_file():
        raise WeightsError(f"{checkpoint}: is the card of {file.name}, which is not next to it; fetch both")
    return str(file)


def exported_file(checkpoint: str) -> Path | None:
    """The exported file that a path names: the file itself, or the only one in a folder without weights."""
    path = Path(file_of_card(checkpoint))
    if path.suffix in RUNTIMES and os.path.isfile(path):  # noqa: PTH113
        return path
    if path.suffix == ".pt2":
        raise WeightsError(
            f"{path}: a torch.export program can run code when it is opened; give its ONNX file"
        )
    if not os.path.isdir(path):  # noqa: PTH112
        return None
    if (path / "checkpoints").is_dir() or any(path.glob("*.safetensors")):
        return None
    there = sorted(file for ending in RUNTIMES for file in path.glob(f"*{ending}"))
    if len(there) > 1:
        raise WeightsError(f"{path}: holds {' and '.join(file.name for file in there)}; give one of them")
    return there[0] if there else None


def open_exported(path: Path) -> tuple[RuntimeModel, TrainingRecord]:
    """An exported file as a model, and the record in its card; empty where it has none."""
    check_recorded_hash(path, str(path))
    card = path.with_name(f"{path.name}.json")
    return RUNTIMES[path.suffix](path), record_of_card(card) if card.is_file() else TrainingRecord()
