"""An ONNX file as a model: onnxruntime on the CPU, whatever device the images are on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError, WeightsError, reason
from fathoms.files.untrusted import read_plain

# protobuf's own limit on one file; a larger model keeps its weights in other files, which are not read.
_MAX_ONNX = 2 << 30


def need(package: str, what: str) -> None:
    """Refuse what needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise FathomsError(f"{what}: {package} is not installed; pip install 'fathoms[onnx]'")


class OnnxModel(nn.Module):
    """An ONNX image classifier: images (B, C, H, W) in, logits out.

    The file is read whole, so that it cannot refer to other files; onnxruntime loads no operators but its own.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        need("onnxruntime", str(path))
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.session = onnxruntime.InferenceSession(
                read_plain(path, _MAX_ONNX), options, providers=["CPUExecutionProvider"]
            )
        # onnxruntime raises classes of its own that have no common base.
        except Exception as error:
            raise WeightsError(
                f"{path}: not a readable ONNX file ({reason(error)}); export it again"
            ) from error
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        sides = [side for side in shape[1:] if isinstance(side, int)]
        if len(shape) != 4 or len(sides) != 3 or not isinstance(outputs[0].shape[-1], int):
            raise WeightsError(
                f"{path}: takes {[(each.name, each.shape) for each in inputs]}, not images (B, C, H, W) of one size; "
                "export it with `fathoms export`"
            )
        self.input_name = inputs[0].name
        self.in_chans, self.img_size = sides[0], (sides[1], sides[2])
        self.num_classes: int = outputs[0].shape[-1]

    def outputs(self, images: Tensor) -> list[Tensor]:
        """All outputs for a batch of images."""
        found = self.session.run(None, {self.input_name: images.detach().float().cpu().numpy()})
        return [torch.from_numpy(output).to(images.device) for output in found]

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.outputs(images)[0]
