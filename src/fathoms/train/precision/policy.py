"""Precision policies: the dtypes of matrix products, of the residual stream and of the weights, by name.

| name | matrix products | residual stream | weights |
|---|---|---|---|
| fp32 | float32 | float32 | float32 |
| autocast_fp32_stream | the dtype of --amp-dtype | float32 | float32, cast at every use |
| autocast (`--amp`) | the dtype of --amp-dtype | the same | float32, cast at every use |
| bf16 | bfloat16 | bfloat16 | float32 master weights, cast once per update |

Norms, scales and tokens stay float32 under every policy, and statistics are always in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.registry import check_name

SUMS = ("fused", "separate")
PRECISIONS = ("fp32", "autocast_fp32_stream", "autocast", "bf16")


def set_stream(model: nn.Module, precision: str) -> None:
    """Set the dtype of a model's residual stream to that of a policy."""
    check_name(precision, PRECISIONS, "precision", "--precision")
    wide = precision == "autocast_fp32_stream"
    if isinstance(model, ViT):
        model.stream_dtype = torch.float32 if wide else None
    elif wide:
        raise ConfigError(
            "--precision autocast_fp32_stream: works on fathoms models only; use autocast, where timm models "
            "keep a float32 stream anyway"
        )


def sums_for(launch: str | None, backend: str | None = "inductor") -> str:
    """How sums are made with a launch: a call from Python may cost more than an addition, unless it is replayed."""
    return "fused" if launch == "graph" and backend == "inductor" else "separate"


def compile_options(backend: str = "inductor", sums: str | None = None) -> dict[str, Any]:
    """What torch.compile is told here, beside the model: with "fused", products take additions in (`ops.sums`).

    None fuses where it can be done, which is in inductor.
    """
    sums = sums or sums_for("graph", backend)
    check_name(sums, SUMS, "form", "sums")
    if sums == "fused" and backend != "inductor":
        raise ConfigError(f"sums 'fused' is made by inductor, not by {backend!r}; use 'separate'")
    options: dict[str, Any] = {"backend": backend, "dynamic": False}
    if sums == "fused":
        # The compiler is imported where it is used.
        from fathoms.ops.sums import FUSE_SUMS

        options["options"] = {"post_grad_custom_post_pass": FUSE_SUMS}
    return options
