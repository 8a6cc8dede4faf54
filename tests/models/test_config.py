"""ViTConfig: invalid options are refused in one line, with the nearest valid name."""

from __future__ import annotations

import typing

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.models import config as config_module
from fathoms.parts import ATTENTIONS, families

# Wrong types are given on purpose here, so the type checker of the test run must be off.
pytestmark = pytest.mark.plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "rns"}, r"norm: no norm is called 'rns'; did you mean 'rmsnorm'\?"),
        ({"norm": "LayerNorm"}, r"no norm is called 'LayerNorm'; did you mean 'layernorm'\?"),
        ({"residual": "layer_scale"}, "did you mean 'layerscale'"),
        ({"attn_placement": "prepost"}, "attn_placement: no placement is called 'prepost'"),
        ({"mlp_placement": "PRE"}, "did you mean 'pre'"),
        ({"stem_norm": "duel"}, "did you mean 'dual'"),
        ({"stem_init": "fanin"}, "stem_init: no start is called 'fanin'; did you mean 'fan_in'"),
        ({"stem": "conv", "patch_size": 2, "stem_init": "trunc_normal"}, "stem 'conv' takes no stem_init"),
        ({"attention": "talking-heads"}, "did you mean 'talking_heads'"),
        ({"attention": "class_attention"}, "use readout='class_attention'"),
        ({"position": "rotary"}, "position: no position is called 'rotary'"),
        ({"readout": "avg"}, "readout: no readout is called 'avg'"),
        ({"mlp": "swi_glu"}, "did you mean 'swiglu'"),
        ({"qk_norm": "dyt"}, "qk_norm: no qk_norm is called 'dyt'"),
        ({"final_norm": "layer"}, "did you mean 'layernorm'"),
        ({"drop_path_schedule": "cosine"}, "drop_path_schedule: no schedule is called 'cosine'"),
        ({"dim": 384, "heads": 7}, "dim=384 is not divisible by heads=7"),
        ({"image_size": 225}, "image_size=225 is not divisible by patch_size=16"),
        ({"depth": 0}, "depth=0 is too small; use 1 or more"),
        ({"depth": 12.0}, "depth=12.0 is not a whole number"),
        ({"drop_path": 1.0}, "drop_path=1.0 is not a probability below 1"),
        ({"mlp_ratio": 0.0}, "mlp_ratio=0.0 leaves the MLP no width"),
        ({"norm": "none", "attn_placement": "post"}, "attn_placement='post' places a norm, but"),
        ({"residual": "deepnorm"}, "residual 'deepnorm' contradicts attn_placement='pre'"),
        ({"residual": "none", "residual_init": 0.1}, "residual 'none' takes no residual_init; leave it out"),
        ({"norm": "layernorm", "norm_init": "ones"}, "norm 'layernorm' takes no norm_init; leave it out"),
        ({"norm": "dyt", "norm_init": "ones"}, "dyt: init='ones' is not a number"),
        ({"norm": "learnable_scaler", "norm_init": "one"}, "did you mean 'ones'"),
        ({"readout": "mean", "distill_token": True}, "distill_token needs a read-out with query tokens"),
        ({"readout": "cls", "class_attention_depth": 3}, "readout 'cls' takes no class_attention_depth"),
        (
            {"stem_norm": "post_pos", "position": "rope"},
            "stem_norm 'post_pos' needs positions that are added",
        ),
        ({"position": "rope", "dim": 36, "heads": 6}, "rope needs dim / heads divisible by 4, not 6"),
        ({"position": "rope", "registers": 3}, "registers=3 is not a square"),
        ({"position": "sincos", "dim": 6, "heads": 1}, "position 'sincos' needs a width divisible by 4"),
        ({"norm_by_depth": "0-11"}, "'0-11' is not a range"),
        ({"norm_by_depth": ""}, "norm_by_depth is empty; write for example '0-2:dyt'"),
        ({"norm_by_depth": "0-12:dyt"}, "leaves the blocks 0-11"),
        ({"norm_by_depth": "0-3:dyt,3-4:derf"}, "block 3 has two norms"),
        ({"norm_by_depth": "0-3:dyd"}, "did you mean 'dyt'"),
        (
            {"placement_by_depth": "0-3:pots"},
            "placement_by_depth: no placement is called 'pots'; did you mean 'post'",
        ),
        (
            {"placement_by_depth": "0-3:post,2:pre"},
            "placement_by_depth: block 2 has two placements; make the ranges",
        ),
        ({"placement_by_depth": "0-12:post"}, "placement_by_depth: '0-12:post' leaves the blocks 0-11"),
        ({"placement_by_depth": ""}, "placement_by_depth is empty"),
        ({"placement_by_depth": "0:post", "norm": "none"}, "places a norm, but norm is 'none'"),
        (
            {"residual": "deepnorm", "placement_by_depth": "0-5:post"},
            "'deepnorm' contradicts attn_placement='pre'",
        ),
        ({"attn_gate": "heads"}, "attn_gate: no attn_gate is called 'heads'; did you mean 'head'"),
        (
            {"attn_gate": "head", "readout": "class_attention"},
            "attn_gate 'head' is defined on self-attention",
        ),
        ({"stem": "convs"}, "stem: no stem is called 'convs'; did you mean 'conv'"),
        (
            {"stem": "conv", "stem_layers": 2, "patch_size": 8, "image_size": 32},
            "patch_size=8 is not the stride of 2",
        ),
        (
            {"stem": "conv", "stem_norm": "dual", "patch_size": 2},
            "stem_norm 'dual' norms the pixels of a patch",
        ),
        ({"stem": "conv", "stem_kernel": 4, "patch_size": 2}, "stem_kernel=4 is even"),
        ({"stem_layers": 2}, "stem 'patch' takes no stem_layers; leave it out, or use 'conv'"),
        ({"readout": "seqpool", "distill_token": True}, "distill_token needs a read-out with query tokens"),
        ({"distill_early": True}, "distill_early needs a distillation token that could come late"),
        (
            {"distill_early": True, "readout": "class_attention"},
            "distill_early needs a distillation token that could come late",
        ),
        ({"class_token_block": 12}, "class_token_block=12 leaves the blocks 0-11"),
        ({"class_token_block": -1}, "class_token_block=-1 leaves the blocks 0-11"),
        ({"class_token_block": 2, "readout": "mean"}, "readout 'mean' takes no class_token_block"),
        (
            {"residual": "mv_split", "readout": "class_attention"},
            "reads the mean of the patches, and class attention",
        ),
        ({"residual": "prores", "residual_warmup": 0.0}, "residual_warmup=0.0 is not a share of the run"),
        ({"residual_warmup": 0.1}, "residual 'none' takes no residual_warmup"),
        (
            {"base_dim": 64, "residual": "completep", "readout": "seqpool"},
            "base_dim: there is no rule for the scores",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(FathomsError, match=message) as caught, torch.device("meta"):
        ViT(ViTConfig(**options))
    assert "\n" not in str(caught.value)


def test_unknown_models_and_options_name_the_nearest():
    with pytest.raises(FathomsError, match="no model is called 'cait_s24'; did you mean 'cait_s24_224'"):
        fathoms.create_model("cait_s24")
    with pytest.raises(FathomsError, match="no option is called 'detph'; did you mean 'depth'"):
        fathoms.create_model("cait_s24_224", detph=3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 32, 32), "images have 1 channels, the model takes 3"),
        ((2, 3, 48, 48), "images are 48x48, the model takes 32x32"),
    ],
)
def test_images_of_another_shape_are_refused(shape, message):
    vit = ViT(ViTConfig(image_size=32, dim=16, heads=2, depth=1))
    with pytest.raises(FathomsError, match=message):
        vit(torch.randn(shape))


def test_literal_types_list_exactly_the_registered_names():
    """The types serve editors and --help; the registries decide."""
    kinds = {"norm": "Norm", "residual": "Residual", "stem_norm": "StemNorm", "attention": "Attention"}
    kinds |= {
        "position": "Position",
        "readout": "Readout",
        "mlp": "MLP",
        "stem": "Stem",
        "attn_gate": "AttnGate",
    }
    kinds |= {"attn_placement": "Placement", "mlp_placement": "Placement"}
    for field, family in families().items():
        names = {
            name for name in family if not (family is ATTENTIONS and ATTENTIONS.metadata(name).reads_context)
        }
        assert set(typing.get_args(getattr(config_module, kinds[field]))) == names


def test_a_start_belongs_to_its_method():
    deit3 = fathoms.create_model("deit3_small_patch16_224", depth=1, residual="rezero")
    assert deit3.config.residual_init is None
    kept = ViTConfig(residual="layerscale", residual_init=0.5).replace(depth=3)
    assert kept.residual_init == 0.5


def test_norm_by_depth_puts_each_norm_where_it_says():
    vit = ViT(ViTConfig(image_size=32, dim=16, heads=2, depth=4, norm_by_depth="0-1:rmsnorm,3:dyt"))
    names = [type(block.attn_join.norm).__name__ for block in vit.blocks]
    assert names == ["RMSNorm", "RMSNorm", "LayerNorm", "DyT"]


names = {field: st.sampled_from(sorted(family)) for field, family in families().items()}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {
            "dim": st.integers(-1, 24),
            "heads": st.integers(0, 5),
            "depth": st.integers(0, 3),
            "patch_size": st.integers(0, 4),
            "image_size": st.integers(0, 9),
            "registers": st.integers(-1, 4),
            "num_classes": st.integers(-1, 3),
            "qkv_bias": st.booleans(),
            "distill_token": st.booleans(),
            **names,
        },
        optional={
            "residual_init": st.floats(-1, 1),
            "norm_init": st.one_of(st.floats(0, 1), st.text(max_size=5)),
            "norm_by_depth": st.text(alphabet="0123-:,dyterfnolaym ", max_size=12),
            "drop_path": st.floats(-0.5, 1.5),
            "mlp_ratio": st.floats(0, 4),
        },
    )
)
def test_any_config_builds_and_runs_or_is_refused_in_one_line(options):
    try:
        vit = ViT(ViTConfig(in_channels=1, **options))
    except FathomsError as error:
        assert "\n" not in str(error)
        return
    size = options["image_size"]
    outputs = options["num_classes"] or options["dim"]
    assert vit(torch.randn(2, 1, size, size)).shape == (2, outputs)
