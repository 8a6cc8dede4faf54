"""Precision policies: the dtypes of matrix products, of the residual stream and of the weights, by name.

| name | matrix products | residual stream | weights |
|---|---|---|---|
| fp32 | float32 | float32 | float32 |
| autocast_fp32_stream | the dtype of --amp-dtype | float32 | float32, cast at every use |
| autocast | the dtype of --amp-dtype | the same | float32, cast at every use |
| bf16 | bfloat16 | bfloat16 | float32 master weights, cast once per update |

Norms, scales and tokens stay float32 under every policy, and statistics are always in float32.
"""

from __future__ import annotations

import torch
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.names.registry import check_name
from fathoms.train.precision.speed import PRECISIONS


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
