"""The named models."""

from __future__ import annotations

import re

import pytest
import torch

import fathoms
from fathoms.errors import ConfigError
from fathoms.models.zoo import model_config
from fathoms.parts import LearnableScaler


def meta(name, **options):
    with torch.device("meta"):
        return fathoms.create_model(name, **options)


def test_the_zoo_holds_what_it_promises():
    names = set(fathoms.list_models())
    assert len(names) == len(fathoms.list_models())
    promised = {
        *(f"cait_{size}_224" for size in ("xs36", "s36", "s48", "m24", "m36")),
        *("cait_m36_384", "cait_m48_448", "vit_s32_dpn_224", "vit5_large", "deit3_large_patch16_384"),
        *(
            "vit_layernorm_embed_dim192_patch16_head3_depth36",
            "vit_scaler_192x36_16",
            "vit_layernorm_192x36_16",
        ),
    }
    assert promised <= names
    for name in names:
        meta(name, depth=1)


def test_every_name_of_learnable_scalers_authors_is_their_model():
    """All names that their vision_transformer.py registers, as (dim, patch, heads, depth) after their names."""
    theirs = [
        "vit_embed_dim120_patch16_head3_depth24",
        "vit_embed_dim192_patch16_head3_depth24",
        "vit_embed_dim198_patch16_head6_depth24",
        "vit_embed_dim198_patch16_head6_depth36",
        "vit_embed_dim288_patch16_head3_depth24",
        "vit_embed_dim288_patch32_head3_depth24",
        "vit_embed_dim288_patch32_head3_depth36",
        "vit_embed_dim384_patch16_head3_224",
        "vit_embed_dim384_patch28_head3_224",
        "vit_embed_dim384_patch32_head3_224",
        "vit_embed_dim384_patch32_head3_depth12",
        "vit_embed_dim384_patch32_head3_depth24_224",
        "vit_layer_scale_embed_dim120_patch16_head3_depth24",
        "vit_layer_scale_embed_dim192_patch16_head3_depth24_224",
        "vit_layer_scale_embed_dim288_patch32_head3_depth24",
        "vit_layer_scale_embed_dim288_patch32_head3_depth36",
        "vit_layer_scale_embed_dim384_patch32_head3_depth24_224",
        "vit_learnable_scaler_embed_dim120_patch16_head3_depth24",
        "vit_learnable_scaler_embed_dim192_patch16_head3_depth12",
        "vit_learnable_scaler_embed_dim192_patch16_head3_depth24",
        "vit_learnable_scaler_embed_dim192_patch16_head3_depth36",
        "vit_learnable_scaler_embed_dim288_patch16_head3_depth24",
        "vit_learnable_scaler_embed_dim288_patch32_head3_depth24",
        "vit_learnable_scaler_embed_dim288_patch32_head3_depth36",
        "vit_learnable_scaler_embed_dim384_patch32_head3_depth12",
        "vit_learnable_scaler_embed_dim384_patch32_head3_depth24",
        "vit_learnable_scaler_embed_dim384_patch32_head6_depth24",
    ]
    for name in theirs:
        shape = re.fullmatch(r"\w+_embed_dim(\d+)_patch(\d+)_head(\d)(?:_depth(\d+))?(?:_224)?", name)
        dim, patch, heads, depth = (int(number or 12) for number in shape.groups())
        config = model_config(name)
        assert (config.dim, config.patch_size, config.heads, config.depth) == (dim, patch, heads, depth)
        assert config.norm == ("learnable_scaler" if "scaler" in name else "layernorm")
        scale = ("layerscale", 1e-5) if "layer_scale" in name else ("none", None)
        assert (config.residual, config.residual_init) == scale


@pytest.mark.parametrize("kind", ["", "_layer_scale", "_learnable_scaler"])
def test_weights_under_the_names_of_the_authors_models_load(kind):
    timm = pytest.importorskip("timm")
    options = {"_layer_scale": {"init_values": 1e-5}, "_learnable_scaler": {"norm_layer": LearnableScaler}}
    sizes = {"img_size": 56, "patch_size": 28, "embed_dim": 384, "depth": 2, "num_heads": 3, "num_classes": 5}
    theirs = timm.create_model("vit_tiny_patch16_224", **sizes, **options.get(kind, {})).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    name = f"vit{kind}_embed_dim384_patch28_head3_depth12"
    own = fathoms.create_model(name, depth=2, image_size=56, num_classes=5).eval()
    fathoms.load_weights(own, theirs.state_dict())
    x = torch.randn(2, 3, 56, 56)
    assert torch.allclose(own(x), theirs(x), atol=1e-4)


def test_timms_names_for_these_families_are_all_here():
    timm = pytest.importorskip("timm")
    for pattern in ("cait_*", "deit_*", "deit3_*"):
        missing = {n for n in timm.list_models(pattern) if "huge" not in n} - set(
            fathoms.list_models(pattern)
        )
        assert not missing


def test_gamma_follows_the_depth_that_is_built():
    """The released XXS-36 alone starts at 1e-5, against CaiT's rule."""
    start = {depth: model_config("cait_xxs36_224", depth=depth).residual_init for depth in (12, 36, 48)}
    assert start == {12: None, 36: 1e-5, 48: None}
    model = fathoms.create_model("cait_xxs36_224", depth=2, dim=48, heads=3, num_classes=2)
    assert model.blocks[0].attn_join.scale.init_value == 0.1


def test_drop_path_rises_over_depth_where_the_authors_code_lets_it():
    """Of ViT, DeiT and CaiT timm's own rates; DeiT-III and ViT-5 are uniform in their authors' code, CCT is linear."""
    timm = pytest.importorskip("timm")
    for name in ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "cait_xxs24_224"):
        own = meta(name, depth=6, drop_path=0.3)
        with torch.device("meta"):
            theirs = timm.create_model(name, depth=6, drop_path_rate=0.3)
        for own_block, block in zip(own.blocks, theirs.blocks, strict=True):
            first = block.drop_path if name.startswith("cait") else block.drop_path1
            rate = pytest.approx(getattr(first, "drop_prob", 0.0))
            assert own_block.attn_join.drop_path.rate == own_block.mlp_join.drop_path.rate == rate
    schedules = {
        name: model_config(name, drop_path=0.1).drop_path_schedule
        for name in ("deit3_small_patch16_224", "vit5_small", "cct_7_7x2_224", "vit_scaler_192x12_16")
    }
    assert list(schedules.values()) == ["uniform", "uniform", "linear", "linear"]
    # CaiT drops nothing in its class-attention blocks.
    assert {b.attn_join.drop_path.rate for b in meta("cait_xxs24_224", drop_path=0.3).readout.blocks} == {0.0}


def test_a_schedule_without_a_drop_path_is_refused():
    with pytest.raises(ConfigError, match="drop_path_schedule would not be used: drop_path is 0"):
        model_config("vit_tiny_patch16_224", drop_path_schedule="uniform")
    assert (
        model_config("cait_xxs24_224", drop_path=0.0).replace(drop_path=0.1).drop_path_schedule == "uniform"
    )


def test_overrides_reach_every_field():
    model = meta("cait_s24_224", norm="dyt", depth=36, image_size=288, num_classes=7)
    config = model.config
    assert (config.norm, config.depth, config.image_size, config.num_classes) == ("dyt", 36, 288, 7)
    assert model.blocks[0].attn_join.scale.init_value == 1e-6
