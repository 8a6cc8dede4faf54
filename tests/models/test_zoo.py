"""The named models."""

from __future__ import annotations

import pytest
import torch

import fathoms


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


def test_timms_names_for_these_families_are_all_here():
    timm = pytest.importorskip("timm")
    for pattern in ("cait_*", "deit_*", "deit3_*"):
        missing = {n for n in timm.list_models(pattern) if "huge" not in n} - set(
            fathoms.list_models(pattern)
        )
        assert not missing


def test_overrides_reach_every_field():
    model = meta("cait_s24_224", norm="dyt", depth=36, image_size=288, num_classes=7)
    config = model.config
    assert (config.norm, config.depth, config.image_size, config.num_classes) == ("dyt", 36, 288, 7)
    assert model.blocks[0].attn_join.scale.init_value == 1e-6
    assert fathoms.create_model("cait_xxs36_224", depth=1).blocks[0].attn_join.scale.init_value == 1e-5
