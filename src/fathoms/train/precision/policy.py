"""In which precision a step is computed, by name, and what is compiled of a model.

| name | matrix products | residual stream | weights |
|---|---|---|---|
| fp32 | float32 | float32 | float32 |
| autocast_fp32_stream | the dtype of --amp-dtype | float32 | float32, cast at every use |
| autocast (`--amp`) | the dtype of --amp-dtype | the same | float32, cast at every use |
| bf16 | bfloat16 | bfloat16 | float32 masters, cast once a step |

Norms, scales and tokens stay float32 under every policy, and statistics are always in float32.
"""

from __future__ import annotations

import torch
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.registry import check_name

PRECISIONS = ("fp32", "autocast_fp32_stream", "autocast", "bf16")


def set_stream(model: nn.Module, precision: str) -> None:
    """Let a model's residual stream have the dtype of a policy."""
    check_name(precision, PRECISIONS, "precision", "train.precision")
    wide = precision == "autocast_fp32_stream"
    if isinstance(model, ViT):
        model.stream_dtype = torch.float32 if wide else None
    elif wide:
        raise ConfigError(
            "train.precision='autocast_fp32_stream' is for fathoms models; use 'autocast', where timm's "
            "models keep a float32 stream anyway"
        )
