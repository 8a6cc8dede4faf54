"""An exported ONNX file as a model, with the card next to it: onnxruntime on the CPU, wherever the images are."""

from __future__ import annotations

import importlib.util
import math
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError, WeightsError, reason
from fathoms.models.training_record import TrainingRecord, record_of_card
from fathoms.models.weights_file import check_recorded_hash
from fathoms.text_table import plural
from fathoms.untrusted import read_plain

# protobuf's own limit on one file; a larger model keeps its weights in other files, which are not read.
_MAX_ONNX = 2 << 30


def need(package: str, what: str) -> None:
    """Refuse what needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise FathomsError(f"{what}: {package} is not installed; pip install 'fathoms[onnx]'")


# Sides and channels of images that a file may ask for, and values of one image.
_MAX_SIDE, _MAX_VALUES = 8192, 1 << 27
SECONDS, SECONDS_AN_IMAGE = 60.0, 10.0
"""A run may take this long and as much again for each image: a loop in a graph need not end."""


class OnnxModel(nn.Module):
    """An ONNX image classifier: images (B, C, H, W) in, logits out.

    The file is read whole and refers to no other file; onnxruntime loads no operators but its own. It is tried on one
    image before anything is asked of it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        for package in ("onnx", "onnxruntime"):
            need(package, str(path))
        import onnx
        import onnxruntime

        self.path = path
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = torch.get_num_threads()
        data = read_plain(path, _MAX_ONNX)
        # Both packages raise classes of their own that have no common base.
        try:
            elsewhere = _stored_elsewhere(onnx.load_model_from_string(data))
            # Opening a session opens the other files too.
            if elsewhere is None:
                self.session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise WeightsError(
                f"{path}: not a readable ONNX file ({reason(error)}); export it again"
            ) from error
        if elsewhere is not None:
            raise WeightsError(
                f"{path}: keeps {elsewhere[:80]!r} in another file, which is not opened; export it as one file"
            )
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        shape = inputs[0].shape if len(inputs) == 1 and inputs[0].type == "tensor(float)" else []
        sides = [side for side in shape[1:] if isinstance(side, int) and 0 < side <= _MAX_SIDE]
        if len(shape) != 4 or len(sides) != 3 or math.prod(sides) > _MAX_VALUES or shape[0] == 0:
            raise self._misfit("takes", inputs, "float32 images (B, C, H, W) of one size")
        # The batch that the file is exported for; 0 where it takes any.
        self._batch = shape[0] if isinstance(shape[0], int) else 0
        logits = outputs[0].shape if outputs[0].type == "tensor(float)" else []
        self.input_name = inputs[0].name
        self.in_chans, self.img_size = sides[0], (sides[1], sides[2])
        found = self.outputs(torch.zeros(1, *sides))[0].shape
        if len(logits) != 2 or not isinstance(logits[1], int) or found != (1, logits[1]):
            raise self._misfit("gives", outputs, "float32 logits (B, classes)")
        self.num_classes: int = logits[1]

    def _misfit(self, verb: str, entries: Iterable[Any], wanted: str) -> WeightsError:
        shown = [(each.name, each.type, each.shape) for each in entries]
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
        import onnxruntime

        limit, options = SECONDS + SECONDS_AN_IMAGE * len(batch), onnxruntime.RunOptions()
        options.log_severity_level = 4
        timer = threading.Timer(limit, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            found: list[Any] = list(self.session.run(None, {self.input_name: batch}, options))
        except Exception as error:
            why = f"more than {limit:.0f} s for {plural(len(batch), 'image')}"
            raise WeightsError(
                f"{self.path}: cannot be run ({why if options.terminate else reason(error)}); export it again"
            ) from error
        finally:
            timer.cancel()
        if not all(isinstance(each, np.ndarray) and each.dtype == np.float32 for each in found):
            raise self._misfit("gives", self.session.get_outputs(), "float32 logits (B, classes)")
        if any(each.ndim < 1 or len(each) != len(batch) for each in found):
            raise WeightsError(
                f"{self.path}: gives {[each.shape for each in found]} for {plural(len(batch), 'image')}, not a row "
                "each; export it with `fathoms export`"
            )
        if not all(np.isfinite(each).all() for each in found):
            raise WeightsError(
                f"{self.path}: gives values that are not finite; its weights are lost, export it again"
            )
        return found

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.outputs(images)[0]


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
    if not is_card or file.suffix not in (".safetensors", ".onnx"):
        return checkpoint
    if not file.is_file():
        raise WeightsError(f"{checkpoint}: is the card of {file.name}, which is not next to it; fetch both")
    return str(file)


def exported_file(checkpoint: str) -> Path | None:
    """The ONNX file that a path names: the file itself, or the only one in a folder without weights."""
    path = Path(file_of_card(checkpoint))
    if path.suffix == ".onnx" and os.path.isfile(path):  # noqa: PTH113
        return path
    if path.suffix == ".pt2":
        raise WeightsError(
            f"{path}: a torch.export program can run code when it is opened; give its ONNX file"
        )
    if not os.path.isdir(path):  # noqa: PTH112
        return None
    if (path / "checkpoints").is_dir() or any(path.glob("*.safetensors")):
        return None
    there = sorted(path.glob("*.onnx"))
    if len(there) > 1:
        raise WeightsError(f"{path}: holds {' and '.join(file.name for file in there)}; give one of them")
    return there[0] if there else None


def open_exported(path: Path) -> tuple[OnnxModel, TrainingRecord]:
    """An ONNX file as a model, and the record in its card; empty where it has none."""
    check_recorded_hash(path, str(path))
    card = path.with_name(f"{path.name}.json")
    return OnnxModel(path), record_of_card(card) if card.is_file() else TrainingRecord()
