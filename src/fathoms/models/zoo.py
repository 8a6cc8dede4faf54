"""Named models: a name is a ViTConfig, and any field of it can be overridden."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fathoms.models.config import FIELDS, ViTConfig, check_early
from fathoms.models.overrides import Overrides
from fathoms.names.registry import check_name

if TYPE_CHECKING:
    from fathoms.models.vit import ViT

Shape = dict[str, Any]

# Width, depth and heads under the names of timm's plain models.
_PLAIN = {
    "tiny": {"dim": 192, "depth": 12, "heads": 3},
    "small": {"dim": 384, "depth": 12, "heads": 6},
    "medium": {"dim": 512, "depth": 12, "heads": 8},
    "base": {"dim": 768, "depth": 12, "heads": 12},
    "large": {"dim": 1024, "depth": 24, "heads": 16},
}

# CaiT: the width of each size; heads are dim / 48.
_CAIT = {"xxs": 192, "xs": 288, "s": 384, "m": 768}
_CAIT_DEPTHS = {"xxs": (24, 36), "xs": (24, 36), "s": (24, 36, 48), "m": (24, 36, 48)}

# Dim, patch, depth of LearnableScaler's models, all with three heads. Each has a LayerNorm twin here,
# also 192/16/36, which its authors report and do not register.
_SCALER = [
    (192, 16, 12),
    (192, 16, 24),
    (192, 16, 36),
    (288, 16, 24),
    (288, 32, 24),
    (288, 32, 36),
    (384, 32, 24),
]


def _plain() -> dict[str, Shape]:
    """ViT, DeiT and DeiT-III under timm's names."""
    sizes = {
        "vit": {"tiny": (16,), "small": (8, 16, 32), "base": (8, 16, 32), "large": (16, 32)},
        "deit": {"tiny": (16,), "small": (16,), "base": (16,)},
        "deit3": {"small": (16,), "medium": (16,), "base": (16,), "large": (16,)},
    }
    extra = {"vit": {}, "deit": {}, "deit3": {"residual": "layerscale", "residual_init": 1e-4}}
    models: dict[str, Shape] = {}
    for family, patches_by_size in sizes.items():
        for size, patches in patches_by_size.items():
            for patch in patches:
                for image in (224, 384):
                    shape = {**_PLAIN[size], "patch_size": patch, "image_size": image, **extra[family]}
                    models[f"{family}_{size}_patch{patch}_{image}"] = shape
                    if family == "deit":
                        models[f"deit_{size}_distilled_patch{patch}_{image}"] = {
                            **shape,
                            "distill_token": True,
                        }
    return models


def _cait() -> dict[str, Shape]:
    """CaiT in every size the paper names, at 224, 384 and 448 pixels."""
    models: dict[str, Shape] = {}
    for size, dim in _CAIT.items():
        for depth in _CAIT_DEPTHS[size]:
            for image in (224, 384, 448):
                models[f"cait_{size}{depth}_{image}"] = {
                    "dim": dim,
                    "depth": depth,
                    "heads": dim // 48,
                    "image_size": image,
                    "attention": "talking_heads",
                    "residual": "layerscale",
                    "readout": "class_attention",
                }
    # The released XXS-36 starts at 1e-5, against the rule of its own paper.
    for image in (224, 384, 448):
        models[f"cait_xxs36_{image}"]["residual_init"] = 1e-5
    return models


def _vit5() -> dict[str, Shape]:
    """ViT-5: RMSNorm everywhere, LayerScale, QK-norm, learned positions and rotations, registers."""
    ingredients = {
        "norm": "rmsnorm",
        "residual": "layerscale",
        "residual_init": 1e-4,
        "qk_norm": "rmsnorm",
        "qkv_bias": False,
        "position": "learned_rope",
        "registers": 4,
    }
    return {
        f"vit5_{size}_patch16_224": {**_PLAIN[size], **ingredients} for size in ("small", "base", "large")
    }


def _scaler() -> dict[str, Shape]:
    """LearnableScaler's models and their LayerNorm twins, under the authors' long names."""
    models: dict[str, Shape] = {}
    for norm in ("learnable_scaler", "layernorm"):
        for dim, patch, depth in _SCALER:
            shape = {"dim": dim, "depth": depth, "heads": 3, "patch_size": patch, "norm": norm}
            models[f"vit_{norm}_embed_dim{dim}_patch{patch}_head3_depth{depth}"] = shape
    return models


def _dual_patch_norm() -> dict[str, Shape]:
    """Plain ViTs with LayerNorms on both sides of the patch projection."""
    short = {"ti": "tiny", "s": "small", "b": "base", "l": "large"}
    return {
        f"vit_{letter}{patch}_dpn_224": {**_PLAIN[size], "patch_size": patch, "stem_norm": "dual"}
        for letter, size in short.items()
        for patch in (16, 32)
    }


# Depth, heads, MLP ratio and width of CCT's sizes; kernel, convolutions and image size of each of its models.
_CCT = {
    2: {"depth": 2, "heads": 2, "mlp_ratio": 1.0, "dim": 128},
    4: {"depth": 4, "heads": 2, "mlp_ratio": 1.0, "dim": 128},
    6: {"depth": 6, "heads": 4, "mlp_ratio": 2.0, "dim": 256},
    7: {"depth": 7, "heads": 4, "mlp_ratio": 2.0, "dim": 256},
    14: {"depth": 14, "heads": 6, "mlp_ratio": 3.0, "dim": 384},
}
_CCT_STEMS = [(2, 3, 2, 32), (4, 3, 2, 32), (6, 3, 1, 32), (6, 3, 2, 32), (7, 3, 1, 32), (7, 3, 2, 32)]
_CCT_STEMS += [(7, 7, 2, 224), (14, 7, 2, 224), (14, 7, 2, 384)]


def _cct() -> dict[str, Shape]:
    """Compact Convolutional Transformers, with learned positions and, as `_sine`, with fixed ones.

    Blocks are those of the paper, pre-norm; the authors' code norms the stream itself after the attention.
    """
    models: dict[str, Shape] = {}
    for size, kernel, layers, image in _CCT_STEMS:
        # A convolution of 7x7 has stride 2, one of 3x3 stride 1, and each is pooled by 2.
        stride = 4 if kernel == 7 else 2
        shape = {
            **_CCT[size],
            "image_size": image,
            "stem": "conv",
            "stem_layers": layers,
            "stem_kernel": kernel,
        }
        shape |= {"patch_size": stride**layers, "readout": "seqpool", "qkv_bias": False}
        models[f"cct_{size}_{kernel}x{layers}_{image}"] = shape
        models[f"cct_{size}_{kernel}x{layers}_{image}_sine"] = {**shape, "position": "sincos"}
    return models


# The default model of the commands: deep and narrow, for scikit-learn's 8x8 handwritten digits.
_DIGITS = {"vit_digits": {"image_size": 8, "patch_size": 2, "in_channels": 1, "num_classes": 10}}
_DIGITS["vit_digits"] |= {"dim": 64, "depth": 24, "heads": 4}

MODELS: dict[str, Shape] = _DIGITS | _plain() | _cait() | _vit5() | _scaler() | _dual_patch_norm() | _cct()

ALIASES: dict[str, str] = {f"vit5_{size}": f"vit5_{size}_patch16_224" for size in ("small", "base", "large")}
for _dim, _patch, _depth in _SCALER:
    for _short, _norm in (("scaler", "learnable_scaler"), ("layernorm", "layernorm")):
        ALIASES[f"vit_{_short}_{_dim}x{_depth}_{_patch}"] = (
            f"vit_{_norm}_embed_dim{_dim}_patch{_patch}_head3_depth{_depth}"
        )


def list_models(pattern: str = "*") -> list[str]:
    """Names of all models and aliases that match a shell pattern, sorted.

    >>> list_models("cait_xxs24_*")
    ['cait_xxs24_224', 'cait_xxs24_384', 'cait_xxs24_448']
    """
    return sorted(fnmatch.filter([*MODELS, *ALIASES], pattern))


def model_config(name: str, **overrides: Any) -> ViTConfig:
    """The config of a named model, with any field overridden."""
    check_name(name, [*MODELS, *ALIASES], "model", "model")
    shape = MODELS[ALIASES.get(name, name)]
    check_early(shape, overrides)
    return ViTConfig(**shape).replace(**overrides)


def create_model(
    name: str,
    *,
    num_classes: int = 1000,
    image_size: int | None = None,
    weights: str | Path | None = None,
    **overrides: Unpack[Overrides],
) -> ViT:
    """Build a model by name.

    Args:
        name: One of `list_models()`.
        num_classes: Outputs of the classifier; 0 for none.
        image_size: Side of the images, if not the one in the name.
        weights: A safetensors file, "hf-hub:OWNER/NAME[@REVISION]", or "timm/NAME[@REVISION]" for timm's own weights
            on the Hub.
        **overrides: Any field of `ViTConfig`.

    >>> create_model("cait_xxs24_224", depth=2, norm="dyt").config.norm
    'dyt'
    """
    for option in overrides:
        check_name(option, (*FIELDS, "weights"), "option", "create_model")
    from fathoms.models.vit import ViT
    from fathoms.models.weights import load_weights

    size = {} if image_size is None else {"image_size": image_size}
    model = ViT(model_config(name, num_classes=num_classes, **size, **overrides))
    if weights is not None:
        load_weights(model, weights)
    return model
