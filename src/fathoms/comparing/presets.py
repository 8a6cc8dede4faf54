"""Comparisons that the field argues about, ready to run: plans with what all their runs share under `train`."""

from __future__ import annotations

from typing import Any

# Patch, channels and blocks; top-1 on ImageNet and ImageNet-V2 with LayerNorm and with LearnableScaler.
_AUTHORS = {
    (16, 192, 24): ("77.14 / 64.9", "78.77 / 67.02"),
    (16, 192, 36): ("76.2 / -", "79.77 / 68.21"),
    (16, 288, 24): ("78.2 / 65.71", "79.72 / 68.16"),
    (32, 288, 24): ("69.93 / 55.81", "74.53 / 60.82"),
    (32, 288, 36): ("67.86 / 53.35", "75.71 / 62.76"),
}
_SCALES = ("none", "layerscale", "rezero", "skipinit", "fixup", "tfixup")

PRESETS: dict[str, dict[str, Any]] = {
    "norms": {"axes": {"norm": ["layernorm", "rmsnorm", "learnable_scaler", "dyt", "derf"]}},
    "scaler": {
        "arms": {
            "layernorm": {"norm": "layernorm"},
            "scaler, normal start": {"norm": "learnable_scaler", "norm_init": "normal"},
            "scaler, ones": {"norm": "learnable_scaler", "norm_init": "ones"},
        },
        "tune": {"lr": ["1e-4", "3e-4", "1e-3", "3e-3"]},
    },
    "learnable_scaler": {
        "train": {"recipe": "learnable_scaler_300"},
        "baseline": "norm=layernorm",
        "arms": {
            f"{patch}, {dim}, {depth}": {"model": f"vit_embed_dim{dim}_patch{patch}_head3_depth{depth}"}
            for patch, dim, depth in _AUTHORS
        },
        "axes": {"norm": ["layernorm", "learnable_scaler"]},
    },
    "residual": {"axes": {"residual": list(_SCALES), "depth": ["12", "24"]}},
    "residual_by_depth": {
        "arms": {
            **{name: {"residual": name} for name in _SCALES},
            **{f"no norm, {name}": {"residual": name, "norm": "none"} for name in _SCALES[2:5]},
        },
        "axes": {"depth": ["12", "24", "36", "48"]},
        "baseline": "none",
    },
    "placements": {
        "axes": {
            "attn_placement": ["pre", "post", "pre_post"],
            "mlp_placement": ["pre", "post", "pre_post"],
        }
    },
    "stem": {"axes": {"stem_norm": ["none", "pre", "post", "dual", "post_pos"]}},
    "dual_patch_norm": {
        # AugReg's training on ImageNet alone, with its medium augmentation.
        "train": {
            **{"epochs": 300, "batch_size": 1024, "grad_accum_steps": 4, "opt": "adamw", "lr": 1e-3},
            **{"weight_decay": 0.1, "warmup_epochs": 32, "clip_grad": 1.0},
            **{"aa": "rand-m15-n2", "mixup": 0.2, "cutmix": 0.0, "smoothing": 0.0},
        },
        "baseline": "stem_norm=none",
        "arms": {
            name: {"model": f"vit_{model}_224"}
            for name, model in {
                "B/32": "base_patch32",
                "S/32": "small_patch32",
                "Ti/16": "tiny_patch16",
            }.items()
        },
        "axes": {"stem_norm": ["none", "pre", "post", "dual", "post_pos"]},
    },
    "cait": {
        "arms": {
            "cls": {"readout": "cls"},
            "class attention 1": {"readout": "class_attention", "class_attention_depth": "1"},
            "class attention 2": {"readout": "class_attention", "class_attention_depth": "2"},
            "class attention 3": {"readout": "class_attention", "class_attention_depth": "3"},
            "talking heads": {
                "readout": "class_attention",
                "class_attention_depth": "2",
                "attention": "talking_heads",
            },
        }
    },
    "cait_ablation": {
        "train": {
            **{"recipe": "cait_400", "model": "vit_small_patch16_224"},
            **{"depth": 24, "residual": "layerscale"},
        },
        "baseline": "class token",
        "arms": {
            "class token": {"readout": "cls"},
            "late class token": {"readout": "cls", "class_token_block": "22"},
            **{
                f"class attention {layers}": {
                    "readout": "class_attention",
                    "class_attention_depth": str(layers),
                }
                for layers in (1, 2)
            },
            "class token, talking heads": {"readout": "cls", "attention": "talking_heads"},
            "class attention 2, talking heads": {
                "readout": "class_attention",
                "class_attention_depth": "2",
                "attention": "talking_heads",
            },
        },
    },
    "finetune": {
        "train": {"recipe": "finetune"},
        "baseline": "all, one rate",
        "arms": {
            "all, one rate": {"layer_decay": "none"},
            "all, layer decay": {"layer_decay": "0.75"},
            # Blocks of one digit stay as they are: of twelve blocks the last two train.
            "last blocks": {"freeze": "[!bnh]*,blocks.?.*"},
            "head": {"freeze": "[!h]*"},
        },
    },
    "optimizers": {"axes": {"opt": ["adamw", "lamb", "muon"]}},
}

PUBLISHED: dict[str, list[str]] = {
    "learnable_scaler": [
        "published, top-1 on ImageNet / ImageNet-V2 with layernorm and with learnable_scaler, one seed:",
        *(
            f"  {patch}, {dim}, {depth}: {plain} and {scaler}"
            for (patch, dim, depth), (plain, scaler) in _AUTHORS.items()
        ),
    ],
    "residual_by_depth": [
        "published, top-1 of DeiT-S on ImageNet with 12, 24 and 36 blocks (arXiv:2103.17239, table 1):",
        "  none, drop-path tuned: 79.9, 81.0, 81.9",
        "  layerscale: 80.5, 82.4, 82.9",
        "  rezero: 78.3, 80.8, 81.6",
        "  fixup: 80.7, 82.3, 82.4",
        "  tfixup: 79.4, 81.5, 82.1",
    ],
    "dual_patch_norm": [
        "published: dual is ahead of none by 1.9 points at most (S/32); pre falls behind on B/32 (arXiv:2302.01327)"
    ],
}
"""What authors have reported of a preset, in lines for its plan."""
