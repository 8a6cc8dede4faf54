"""The parts of 2025 and 2026, each as options of a small model; shared by the tests of what they work with."""

from __future__ import annotations

SMALL = {"image_size": 16, "patch_size": 4, "dim": 24, "heads": 3, "depth": 3, "num_classes": 5}
"""16 patches and three blocks."""

PARTS = {
    "completep": {"residual": "completep", "base_depth": 1, "base_dim": 8},
    "depth_mup": {"residual": "depth_mup", "base_depth": 1},
    "layernorm_scaling": {"residual": "layernorm_scaling"},
    "orthogonal": {"residual": "orthogonal"},
    "mv_split": {"residual": "mv_split"},
    "prores": {"residual": "prores"},
    "keel": {"attn_placement": "keel", "mlp_placement": "keel"},
    "mix_ln": {"placement_by_depth": "0-0:post"},
    "head_gate": {"attn_gate": "head"},
    "channel_gate": {"attn_gate": "channel"},
    "gated_talking_heads": {"attn_gate": "head", "attention": "talking_heads"},
    "conv_stem": {"stem": "conv", "stem_layers": 2},
    "seqpool": {"readout": "seqpool"},
    "late_class_token": {"class_token_block": 2},
}
"""Options of ViTConfig by the part's name."""

TOGETHER = {
    "updates": {"residual": "mv_split", "class_token_block": 2, "attn_gate": "channel", "registers": 2},
    "small_data": {"residual": "prores", "stem": "conv", "readout": "seqpool", "attn_gate": "head"},
    "transfer": {
        **{"residual": "completep", "base_depth": 1, "placement_by_depth": "1-1:keel"},
        **{"drop_path": 0.2},
    },
}
"""The same parts a few at a time, where a test takes seconds."""
