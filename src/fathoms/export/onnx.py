"""Write a model as an ONNX file with a dynamic batch size."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from torch import nn

from fathoms.errors import FathomsError, reason
from fathoms.evaluate.onnx_model import need
from fathoms.surgery.inputs import example_images

# The first opset in which every operation of a Vision Transformer, layer norms included, is ONNX's own.
OPSET = 18
OPSETS = range(OPSET, 24)


def write_onnx(model: nn.Module, path: Path, opset: int = OPSET) -> None:
    """Write a model as one ONNX file for inference: input "images" with any batch size, output "logits"."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "export")
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
