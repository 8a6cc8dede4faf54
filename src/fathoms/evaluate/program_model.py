"""A torch.export program (.pt2) as a model. Opening one can run code, so only the user's own are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import WeightsError, reason


class ProgramModel(nn.Module):
    """A torch.export program of an image classifier: images (B, C, H, W) in, logits out."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            program = torch.export.load(path)
            nodes = {node.name: node for node in program.graph.nodes}
            (images,), (logits, *_) = (
                program.graph_signature.user_inputs,
                program.graph_signature.user_outputs,
            )
            shape, out = (list(nodes[str(name)].meta["val"].shape) for name in (images, logits))
            self.in_chans, self.img_size, self.num_classes = shape[1], (shape[2], shape[3]), int(out[-1])
            self.program: Any = program.module()
        # A damaged archive raises anything from torch's readers.
        except Exception as error:
            raise WeightsError(f"{path}: not a program of images to logits ({reason(error)})") from error

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        found = self.program(images)
        return found if isinstance(found, Tensor) else found[0]

    def train(self, mode: bool = True) -> ProgramModel:
        """A program has the mode it was exported in, which is inference."""
        del mode
        return self
