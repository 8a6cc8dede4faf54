"""Named models: a name is a ViTConfig, of which any field can be overridden, and the data configuration of its authors.

A name brings its crop share, filter, mean and standard deviation to training, evaluation, prediction and export
alike; a recipe, a flag or the record of a run overrides it. Importing this file imports neither torch nor timm.
"""

from __future__ import annotations

import difflib
import fnmatch
from typing import Any

from fathoms.errors import ConfigError, UnknownNameError
from fathoms.models.build_timm import TIMM, timm_preprocessing
from fathoms.models.config import ViTConfig, check_early
from fathoms.registry import check_name

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

# Dim, patch, heads, depth of the models in LearnableScaler's fork. Its authors register some of them for one norm
# or two; here each has a twin with LayerNorm, and one with LayerScale, which starts at 1e-5 at any depth.
_SCALER = [
    *(
        (120, 16, 3, 24),
        (192, 16, 3, 12),
        (192, 16, 3, 24),
        (192, 16, 3, 36),
        (198, 16, 6, 24),
        (198, 16, 6, 36),
    ),
    *((288, 16, 3, 24), (288, 32, 3, 24), (288, 32, 3, 36), (384, 16, 3, 12), (384, 28, 3, 12)),
    *((384, 32, 3, 12), (384, 32, 3, 24), (384, 32, 6, 24)),
]
# LayerScale's models that the authors' names end in the size of the images.
_SIZED = ("embed_dim192_patch16_head3_depth24", "embed_dim384_patch32_head3_depth24")
_TWINS: dict[str, Shape] = {
    "learnable_scaler": {"norm": "learnable_scaler"},
    "layernorm": {},
    "layer_scale": {"residual": "layerscale", "residual_init": 1e-5},
}


def _plain() -> dict[str, Shape]:
    """ViT, DeiT and DeiT-III under timm's names."""
    sizes = {
        "vit": {"tiny": (16,), "small": (8, 16, 32), "base": (8, 16, 32), "large": (16, 32)},
        "deit": {"tiny": (16,), "small": (16,), "base": (16,)},
        "deit3": {"small": (16,), "medium": (16,), "base": (16,), "large": (16,)},
    }
    extra = {"vit": {}, "deit": {}, "deit3": {"residual": "layerscale", "residual_init": 1e-4}}
    extra["deit3"] |= {"class_position": False, "drop_path_schedule": "uniform"}
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
                    "drop_path_schedule": "uniform",
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
        "class_position": False,
        "registers": 4,
        "drop_path_schedule": "uniform",
    }
    return {
        f"vit5_{size}_patch16_224": {**_PLAIN[size], **ingredients} for size in ("small", "base", "large")
    }


def _scaler() -> tuple[dict[str, Shape], dict[str, str]]:
    """LearnableScaler's models and their twins under the authors' long names, and the other names that lead to them."""
    models: dict[str, Shape] = {}
    aliases: dict[str, str] = {}
    for dim, patch, heads, depth in _SCALER:
        body = f"embed_dim{dim}_patch{patch}_head{heads}"
        for twin, options in _TWINS.items():
            name = f"vit_{twin}_{body}_depth{depth}"
            models[name] = {"dim": dim, "depth": depth, "heads": heads, "patch_size": patch, **options}
            if twin == "layernorm":
                # The authors' names of these say no norm.
                aliases[name.replace("_layernorm", "")] = name
            if heads == 3 and twin != "layer_scale":
                aliases[f"vit_{twin.removeprefix('learnable_')}_{dim}x{depth}_{patch}"] = name
    for name in ("vit_embed_dim384_patch32_head3_depth24", *(f"vit_layer_scale_{body}" for body in _SIZED)):
        aliases[f"{name}_224"] = aliases.get(name, name)
    for patch in (16, 28, 32):
        short = f"vit_embed_dim384_patch{patch}_head3"
        aliases[f"{short}_224"] = aliases[f"{short}_depth12"]
    return models, aliases


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
_DIGITS: dict[str, Shape] = {
    "vit_digits": {"image_size": 8, "patch_size": 2, "in_channels": 1, "num_classes": 10}
}
_DIGITS["vit_digits"] |= {"dim": 64, "depth": 24, "heads": 4, "drop_path_schedule": "uniform"}

_SCALER_MODELS, ALIASES = _scaler()
MODELS: dict[str, Shape] = {
    **_DIGITS,
    **_plain(),
    **_cait(),
    **_vit5(),
    **_SCALER_MODELS,
    **_dual_patch_norm(),
    **_cct(),
}
ALIASES |= {f"vit5_{size}": f"vit5_{size}_patch16_224" for size in ("small", "base", "large")}


def list_models(pattern: str = "*") -> list[str]:
    """Names of all models and aliases that match a shell pattern, sorted.

    >>> list_models("cait_xxs24_*")
    ['cait_xxs24_224', 'cait_xxs24_384', 'cait_xxs24_448']
    """
    return sorted(fnmatch.filter([*MODELS, *ALIASES], pattern))


def model_config(name: str, **overrides: Any) -> ViTConfig:
    """The config of a named model, with any field overridden."""
    known = [*MODELS, *ALIASES]
    family, rest, _ = name.partition("_") if isinstance(name, str) else ("", "", "")
    if rest and not difflib.get_close_matches(family, {each.partition("_")[0] for each in known}):
        raise UnknownNameError(
            f"model: no model is called {name!r}; see `fathoms models`; one of timm's is 'timm/{name}' in a command"
        )
    check_name(name, known, "model", "model")
    shape = MODELS[ALIASES.get(name, name)]
    if shape.get("readout") == "class_attention" and overrides.get("depth", shape["depth"]) != shape["depth"]:
        # An exception to CaiT's rule belongs to the released depth.
        shape = {option: value for option, value in shape.items() if option != "residual_init"}
    check_early(shape, overrides)
    config = ViTConfig(**shape).replace(**overrides)
    if "drop_path_schedule" in overrides and not config.drop_path:
        raise ConfigError("drop_path_schedule would not be used: drop_path is 0; leave it out, or set that")
    return config


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def data_config(model: str | None) -> dict[str, Any]:
    """The data configuration of a model's authors or of timm; empty where a name has none.

    >>> data_config("vit_scaler_192x36_16")["mean"], data_config("cait_s24_224")["crop_pct"], data_config("vit_digits")
    ((0.5, 0.5, 0.5), 1.0, {})
    """
    if model is not None and model.startswith(TIMM):
        return timm_preprocessing(model)
    name = ALIASES.get(str(model), str(model))
    if name not in MODELS or name.startswith(("vit_digits", "cct_")):
        return {}
    # timm's small model with patches of 8 is DINO's.
    half = name.startswith("vit_") and not name.startswith("vit_small_patch8")
    whole = name.startswith(("cait_", "vit5_")) or name.endswith("_384")
    return {**(_HALF if half else IMAGENET), "crop_pct": 1.0 if whole else 0.9, "interpolation": "bicubic"}
