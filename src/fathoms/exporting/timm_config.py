"""The config.json that timm reads: `create_model("local-dir:FOLDER", pretrained=True)` loads the weights beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fathoms.models.build_timm import TIMM
from fathoms.models.config import ViTConfig
from fathoms.models.vit import ViT
from fathoms.surgery.inputs import example_images, image_shape

TOLERANCE = 1e-5
"""Largest difference between timm's logits and the model's."""


def write_timm_config(model: nn.Module, weights: Path, name: str, about: dict[str, Any]) -> tuple[str, ...]:
    """Write config.json beside the weights if timm builds the same model from it; else a line says why not.

    Args:
        model: The model whose weights were written under timm's names.
        weights: Their file.
        name: The name of the model, "timm/NAME" for one of timm.
        about: The card, with preprocessing and class names.
    """
    try:
        import timm
    except ImportError:
        return (
            "config.json: not written, since timm is not installed to check it; pip install 'fathoms[timm]'",
        )
    config = json.dumps(_config(model, name, about, timm.list_models()), indent=2)
    images = example_images(model, 2)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        (Path(folder) / "model.safetensors").symlink_to(weights.resolve())
        # timm raises errors of many kinds on an architecture that is not its own.
        try:
            theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            with torch.no_grad():
                gap = float((theirs(images) - model(images)).abs().max())
            why = "" if gap <= TOLERANCE else f"its logits differ by {gap:.2g}"
        except Exception as error:  # noqa: BLE001
            why = " ".join(str(error).split())[:200]
    if why:
        return (f"config.json: not written, since timm builds another model ({why})",)
    (weights.parent / "config.json").write_text(config + "\n")
    return ()


def _config(model: nn.Module, name: str, about: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """The architecture with its arguments, and how images are prepared."""
    channels, *sides = image_shape(model)
    seen = about.get("preprocessing") or {}
    prepared = {key: seen[key] for key in ("mean", "std", "interpolation", "crop_pct") if key in seen}
    prepared |= {"input_size": [channels, *sides], "fixed_input_size": True, "num_classes": model.num_classes}
    architecture = name.removeprefix(TIMM).partition(".")[0]
    arguments: dict[str, Any] = {}
    if isinstance(model, ViT):
        fallback, arguments = _arguments(model.config)
        architecture = architecture if architecture in known else fallback
        prepared |= {"first_conv": "patch_embed.proj", "classifier": "head"}
        if model.config.distill_token:
            prepared["classifier"] = ["head", "head_dist"]
    found: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "model_args": arguments,
    }
    if about.get("classes"):
        found["label_names"] = list(about["classes"])
    return {**found, "pretrained_cfg": prepared}


def _arguments(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """An architecture of timm of the same family, and the arguments that make it this model."""
    found: dict[str, Any] = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
    }
    if config.readout == "class_attention":
        return "cait_xxs24_224", {**found, "depth_token_only": config.class_attention_depth}
    if config.residual == "layerscale":
        found["init_values"] = 1e-5
    if config.norm != "layernorm":
        found["norm_layer"] = config.norm
    if config.qk_norm != "none":
        found["qk_norm"] = True
    found["no_embed_class"] = not config.places_queries
    if config.distill_token:
        return "deit_tiny_distilled_patch16_224", found
    if config.registers:
        found["reg_tokens"] = config.registers
    found["class_token"] = config.readout != "mean"
    found["global_pool"] = "token" if config.readout == "cls" else "avg"
    found["fc_norm"] = config.readout == "mean_cls"
    return "vit_tiny_patch16_224", found
