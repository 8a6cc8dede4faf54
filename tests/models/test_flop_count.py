"""Parameters and multiplications: the published figures, and an independent count."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

import fathoms
from fathoms import ViT, ViTConfig
from fathoms.parts import ClassAttention, PatchEmbed

# CaiT's table: parameters in millions, multiplications in billions at the image size of the name.
# Each figure is rounded where the paper rounds it.
CAIT = [
    ("cait_xxs24_224", 11.96, "2.5"),
    ("cait_xxs24_384", None, "9.5"),
    ("cait_xxs36_224", 17.30, "3.8"),
    ("cait_xxs36_384", None, "14.2"),
    ("cait_xs24_224", 26.6, "5.4"),
    ("cait_xs24_384", None, "19.3"),
    ("cait_xs36_224", 38.6, "8.1"),
    ("cait_xs36_384", None, "28.8"),
    ("cait_s24_224", 46.9, "9.4"),
    ("cait_s24_384", None, "32.2"),
    ("cait_s36_224", 68.2, "13.9"),
    ("cait_s36_384", None, "48.0"),
    ("cait_s48_224", 89.5, "18.6"),
    ("cait_s48_384", None, "63.8"),
    ("cait_m24_224", 185.9, "36.0"),
    ("cait_m24_384", None, "116.1"),
    ("cait_m36_224", 270.9, "53.7"),
    ("cait_m36_384", None, "173.3"),
    ("cait_m48_448", 356.5, "329.6"),
]


def meta(name, **options):
    with torch.device("meta"):
        return fathoms.create_model(name, **options)


def matmul_count(model):
    """Multiplications in matrix products, by torch's own counter, which counts additions too.

    Class attention makes keys and values here, as papers count them.
    """
    for module in model.modules():
        if isinstance(module, ClassAttention):
            module.impl = "reference"
    return matmuls_as_run(model)


def matmuls_as_run(model):
    """By torch's counter without its hooks on all modules, which would have each linear called."""
    counter = FlopCounterMode(display=False)
    with _FlopCounterMode(counter), sdpa_kernel(SDPBackend.MATH):
        config, device = model.config, model.head.weight.device
        model(torch.randn(1, config.in_channels, config.image_size, config.image_size, device=device))
    return counter.get_total_flops() // 2


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "millions", "billions"), CAIT)
def test_cait_has_its_published_size(name, millions, billions):
    model = meta(name)
    if millions is not None:
        assert parameters(model) / 1e6 == pytest.approx(millions, rel=0.01)
    matmuls = matmul_count(model)
    rounding = 0.5 * 10 ** -len(billions.partition(".")[2])
    assert abs(matmuls / 1e9 - float(billions)) <= 0.01 * float(billions) + rounding
    # The paper counts matrix products alone; element by element there are a few per mille more.
    assert 1.0 < model.flop_count() / matmuls < 1.01


@pytest.mark.parametrize("norm", ["learnable_scaler", "layernorm"])
@pytest.mark.parametrize(
    ("dim", "patch", "depth"), [(192, 16, 24), (192, 16, 36), (288, 16, 24), (288, 32, 24), (288, 32, 36)]
)
def test_every_row_of_learnable_scalers_table_has_its_size(norm, dim, patch, depth):
    """Counted by hand: 12 D² + 13 D a block with either norm's 2 D, and the rest of a ViT around it."""
    model = meta(f"vit_{norm}_embed_dim{dim}_patch{patch}_head3_depth{depth}")
    tokens = (224 // patch) ** 2
    block = 12 * dim**2 + 9 * dim + 2 * 2 * dim
    # Projection, positions of the patches and of the class token, and the class token.
    stem = 3 * patch**2 * dim + dim + (tokens + 1) * dim + dim
    assert parameters(model) == depth * block + stem + 2 * dim + 1000 * dim + 1000
    attention = 2 * (tokens + 1) ** 2 * dim
    matmuls = depth * (12 * (tokens + 1) * dim**2 + attention) + tokens * 3 * patch**2 * dim + 1000 * dim
    assert model.flop_count() == pytest.approx(matmuls, rel=0.01)


def elementwise(model):
    """Multiplications outside matrix products, written apart from the code's own count."""
    config = model.config
    patches = config.grid**2
    tokens = patches + model.num_prefix_tokens
    dim, heads = config.dim, config.heads
    per_norm = {"layernorm": 3, "rmsnorm": 3, "learnable_scaler": 1, "dyt": 2}[config.norm] * dim
    hidden = int(dim * config.mlp_ratio)
    scaled = 2 * dim if config.residual == "layerscale" else 0
    block = tokens * (2 * per_norm + 2 * hidden + scaled + dim) + heads * tokens**2
    if config.qk_norm == "rmsnorm":
        block += 2 * 3 * tokens * dim
    if config.position == "learned_rope":
        block += 4 * tokens * dim
    # The final norm sees the tokens that are read.
    total = config.depth * block + (tokens if config.readout == "mean" else 1) * per_norm
    if config.readout == "mean":
        total += dim
    if config.readout == "class_attention":
        keys = patches + 1
        # Before the attention the norm sees queries and context, after it the query alone.
        normed = keys if config.attn_placement == "pre" else 1
        step = normed * per_norm + per_norm + 2 * hidden + scaled + dim + heads * keys
        if config.qk_norm == "rmsnorm":
            step += 3 * (1 + keys) * dim
        total += config.class_attention_depth * step
    return total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "learnable_scaler", "readout": "mean"},
        {"norm": "dyt", "residual": "layerscale"},
        {"attention": "talking_heads", "residual": "layerscale", "readout": "class_attention"},
        {"readout": "class_attention", "qk_norm": "rmsnorm", "attn_placement": "post"},
        {"norm": "rmsnorm", "qk_norm": "rmsnorm", "position": "learned_rope", "registers": 4},
    ],
    ids=str,
)
def test_flop_count_is_the_matmuls_of_torchs_counter_plus_the_elementwise_terms(options):
    model = ViT(
        ViTConfig(image_size=48, patch_size=8, dim=48, heads=4, depth=3, num_classes=10, **options)
    ).eval()
    assert model.flop_count() == matmul_count(model) + elementwise(model)


def test_class_attention_as_it_runs_spares_the_keys_and_values():
    """Of 2 N D² a block are left 2 N D H for N patches, and 2 D² for the query itself."""
    model = meta("cait_xxs24_224", depth=1)
    dim, heads, patches, blocks = 192, 4, 196, 2
    spared = matmuls_as_run(model)
    keys_and_values = 2 * (patches + 1) * dim**2 + 2 * (patches + 1) * dim
    absorbed = 2 * dim**2 + 2 * (patches + 1) * dim * heads
    assert matmul_count(model) - spared == blocks * (keys_and_values - absorbed)
    assert model.flop_count() > matmul_count(model)


def test_the_stem_counts_its_norms():
    assert PatchEmbed(8, 4, 3, "dual").flop_count(5) == 5 * (48 * 8 + 3 * 48 + 3 * 8)
