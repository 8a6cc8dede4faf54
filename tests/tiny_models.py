"""Tiny Vision Transformers that several test files share."""

from __future__ import annotations

import torch

from fathoms import ViT, ViTConfig

VARIANTS = {
    "plain": {},
    "cait": {"attention": "talking_heads", "residual": "layerscale", "readout": "class_attention"},
    "vit5": {
        "norm": "rmsnorm",
        "residual": "layerscale",
        "qk_norm": "rmsnorm",
        "qkv_bias": False,
        "position": "learned_rope",
        "registers": 4,
    },
    "scaler": {"norm": "learnable_scaler", "readout": "mean", "position": "sincos"},
    "fixup": {"norm": "none", "residual": "fixup", "mlp": "swiglu", "stem_norm": "dual"},
    "distilled": {"distill_token": True, "residual": "rezero_shared", "attn_placement": "res_post"},
    "deepnorm": {"residual": "deepnorm", "attn_placement": "post", "mlp_placement": "post", "norm": "derf"},
}
"""Options of ViTConfig that lead through different parts."""
SMALL = {"image_size": 16, "patch_size": 4, "dim": 24, "heads": 3, "depth": 2, "num_classes": 5}

LAYERSCALE = ViTConfig(
    image_size=16, patch_size=4, dim=32, heads=2, depth=3, num_classes=5, residual="layerscale", readout="cls"
)


def perturbed_vit(**more):
    """Two small blocks in inference whose parameters, scales and shifts included, are off their initial values."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL | more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def random_images(batch=8, size=16):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def layerscale_vit():
    """Three blocks of 32 channels with LayerScale, newly initialised."""
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 4, "dim": 32, "heads": 2, "depth": 3, "num_classes": 5}
    return ViT(ViTConfig(**sizes, residual="layerscale", readout="cls"))


def labelled_batch():
    """Six images and labels for `LAYERSCALE`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 16, 16, generator=generator), torch.randint(0, 5, (6,), generator=generator)
