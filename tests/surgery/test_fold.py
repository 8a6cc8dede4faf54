"""Fold: the same outputs without the scales, for models of every library."""

from __future__ import annotations

import copy
import itertools

import pytest
import timm
import torch
import torchvision
from torch import nn
from transformers import Dinov2Config, Dinov2ForImageClassification, ViTForImageClassification
from transformers import ViTConfig as TransformersConfig

from fathoms import FathomsError, ViT, ViTConfig, load_weights, norms, save_weights
from fathoms.parts import NORMS, RESIDUALS, LayerScale, LearnableScaler, NoNorm
from fathoms.surgery.fold import fold
from fathoms.surgery.swap import swap_norms

SMALL = {"image_size": 16, "patch_size": 8, "dim": 24, "heads": 3, "depth": 1, "num_classes": 5}
CAIT = {"attention": "talking_heads", "residual": "layerscale", "readout": "class_attention"}
VIT5 = {"norm": "rmsnorm", "residual": "layerscale", "qk_norm": "rmsnorm", "qkv_bias": False}
VIT5 |= {"position": "learned_rope", "registers": 4, "mlp": "swiglu", "heads": 2}


def moved(model):
    """Off its start, where ones and zeros would hide what a fold forgets."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def vit(**more):
    return moved(ViT(ViTConfig(**SMALL | more)))


def images(batch=3, size=16):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def combinations():
    for residual, norm in itertools.product(RESIDUALS, NORMS):
        method = RESIDUALS.metadata(residual)
        # Without a norm these have no learned scale: see the test of errors.
        if norm == "none" and (method.needs_norm or residual in ("none", "tfixup", "orthogonal")):
            continue
        placement = method.placements[0] if norm != "none" else "pre"
        yield {"residual": residual, "norm": norm, "attn_placement": placement, "mlp_placement": placement}


def placements():
    for norm in ("layernorm", "learnable_scaler", "dyt"):
        for attn, mlp in (
            ("pre", "post"),
            ("post", "pre_post"),
            ("pre_post", "res_post"),
            ("res_post", "pre"),
            ("keel", "keel"),
        ):
            yield {"norm": norm, "attn_placement": attn, "mlp_placement": mlp, "residual": "layerscale"}


@pytest.mark.parametrize("switches", [*combinations(), *placements(), CAIT, VIT5], ids=str)
def test_every_combination_folds_to_the_same_function(switches):
    model = vit(**switches)
    before = copy.deepcopy(model.state_dict())
    folded, report = fold(model)
    assert report.difference < 1e-5
    assert torch.allclose(folded(images()), model.eval()(images()), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert folded.flop_count() <= model.flop_count()


@pytest.mark.parametrize("switches", [*placements(), CAIT, VIT5], ids=str)
def test_folding_twice_is_folding_once(switches):
    folded, _ = fold(vit(**switches))
    again, second = fold(folded)
    assert len(second) == 0
    assert torch.equal(again(images()), folded(images()))


@pytest.mark.parametrize("residual", ["none", "layerscale", "rezero", "rezero_shared", "skipinit"])
@pytest.mark.parametrize("readout", ["cls", "mean", "class_attention"])
def test_a_folded_scaler_network_has_no_norm_and_is_a_plain_network(residual, readout):
    model = vit(norm="learnable_scaler", residual=residual, readout=readout, drop_path=0.1)
    folded, report = fold(model)
    assert not norms(folded).rows
    assert report.left == ()
    assert isinstance(folded.norm, NoNorm)
    assert (folded.config.norm, folded.config.residual, folded.config.drop_path) == ("none", "none", 0.0)
    assert not any(isinstance(module, LearnableScaler | LayerScale) for module in folded.modules())
    assert report.drop_paths > 0
    with pytest.raises(FathomsError, match="was folded and has no norm left; swap before folding"):
        swap_norms(folded, "layernorm")


def test_a_part_that_is_left_has_a_reason():
    reasons = dict(fold(vit(stem_norm="dual", qk_norm="layernorm", attn_placement="post"))[1].left)
    assert reasons["stem.ln1.weight, bias"] == "its output goes into an addition, as the residual stream is"
    assert "attention" in reasons["blocks.0.attn.q_norm.weight, bias"]
    assert "blocks.0.attn_join.norm.weight, bias" in reasons


def test_the_norm_on_the_pixels_goes_into_the_patch_projection():
    _, report = fold(vit(stem_norm="pre"))
    assert [row.into for row in report if row.name == "stem.ln0.weight, bias"] == [("stem.proj.weight",)]


def test_the_table_and_the_json_report_what_was_saved():
    _, report = fold(vit(**CAIT))
    assert report.operations == 6
    assert report.table().splitlines()[-2:] == [
        f"{len(report)} parts folded, 0 left, 6 operations and {report.parameters[0] - report.parameters[1]} "
        "parameters saved",
        f"output differs by {report.difference:.2g} of its largest value",
    ]
    assert report.to_json()["operations"] == 6


PEERS = {
    "vit_tiny_patch16_224": {"img_size": 32},
    "deit3_small_patch16_224": {"img_size": 32, "init_values": 0.1},
    "deit_tiny_distilled_patch16_224": {"img_size": 32},
    "cait_xxs24_224": {"img_size": 32},
    "eva02_tiny_patch14_224": {"img_size": 28},
    "eva_giant_patch14_224": {"img_size": 28, "embed_dim": 48, "num_heads": 4},
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 48, "num_heads": 4},
    "vit_small_patch14_dinov2": {"img_size": 28},
    "vit_base_patch16_siglip_224": {"img_size": 32, "embed_dim": 48, "num_heads": 4},
}


@pytest.mark.parametrize("name", PEERS)
def test_timm_models_fold_completely(name):
    model = moved(timm.create_model(name, num_classes=5, depth=1, **PEERS[name]))
    size = PEERS[name]["img_size"]
    folded, report = fold(model)
    assert report.left == ()
    assert len(report) >= 3
    assert torch.allclose(folded(images(2, size)), model.eval()(images(2, size)), rtol=1e-3, atol=1e-4)
    assert len(fold(folded)[1]) == 0
    assert all(row.became != "set to one" for row in report) or name.startswith("cait")


@pytest.mark.parametrize("build", [ViTForImageClassification, Dinov2ForImageClassification])
def test_transformers_models_fold(build):
    config = {ViTForImageClassification: TransformersConfig, Dinov2ForImageClassification: Dinov2Config}[
        build
    ]
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = moved(build(config(**sizes, image_size=16, patch_size=8)))
    folded, report = fold(model)
    assert len(report) == (5 if build is ViTForImageClassification else 8)
    assert torch.allclose(folded(images()).logits, model.eval()(images()).logits, rtol=1e-3, atol=1e-4)


def test_torchvision_multihead_attention_takes_the_norm_before_it():
    model = moved(torchvision.models.VisionTransformer(16, 8, 1, 2, 24, 48, num_classes=5))
    _, report = fold(model)
    assert report.rows[0].into == ("encoder.layers.encoder_layer_0.self_attention.in_proj_weight",)


class Tied(nn.Module):
    """Two norms that read and feed one shared linear."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.own(self.c(self.shared(self.a(x)) + self.shared(self.b(x))))


def test_a_shared_linear_is_refused_with_the_reason():
    _, report = fold(moved(Tied()), images=torch.randn(2, 4))
    assert [row.name for row in report] == ["c.weight, bias"]
    assert dict(report.left) == {
        "a.weight, bias": "shared.weight is shared with another place",
        "b.weight, bias": "shared.weight is shared with another place",
    }


def test_a_tied_weight_is_refused_with_the_reason():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model[3].weight = model[1].weight
    _, report = fold(moved(model), images=torch.randn(2, 4))
    assert len(report) == 0
    assert report.left == (("0.weight, bias", "1.weight is shared with another place"),)


def test_one_norm_for_two_linears_goes_into_both():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(4), nn.Linear(4, 3, bias=False), nn.Linear(4, 3)

        def forward(self, x):
            x = self.norm(x)
            return self.q(x) * self.k(x)

    folded, report = fold(moved(Both()), images=torch.randn(2, 4))
    assert set(report.rows[0].into) == {"q.weight", "k.weight"}
    assert folded.q.bias is not None


def test_convolutions_take_scales_on_either_side_but_no_shift_under_padding():
    def net(padding):
        parts = [nn.Conv2d(3, 4, 3), swapped(4), nn.ReLU(), swapped(4), nn.Conv2d(4, 2, 3, padding=padding)]
        return moved(nn.Sequential(*parts))

    def swapped(channels):
        norm = nn.Sequential(nn.BatchNorm2d(channels)).eval()
        swap_norms(norm, "learnable_scaler")
        return norm[0]

    _, report = fold(net(0), images=images())
    assert [row.into for row in report] == [("0.weight",), ("4.weight",)]
    _, report = fold(net(1), images=images())
    assert [row.into for row in report] == [("0.weight",)]
    assert "pads with zeros" in report.left[0][1]


@pytest.mark.parametrize("groups", [1, 2, 8], ids=["plain", "grouped", "depthwise"])
def test_convolutions_in_groups_take_scales_and_shifts_on_either_side(groups):
    parts = [nn.Conv2d(8, 16, 3, groups=groups), nn.BatchNorm2d(16), nn.ReLU()]
    parts += [nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, groups=groups, bias=False)]
    model, x = moved(nn.Sequential(*parts)).eval(), torch.randn(2, 8, 9, 9)
    swapped = copy.deepcopy(model)
    swap_norms(swapped, "learnable_scaler")
    folded, report = fold(swapped, images=x)
    assert [row.into for row in report] == [("0.weight",), ("4.weight",)]
    assert torch.allclose(folded(x), model(x), atol=1e-4)


def test_batchnorms_that_stay_are_said_to_fold_after_a_swap():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    _, report = fold(model, images=images())
    assert report.left[0][0] == "1.weight, bias"
    assert report.notes[0].startswith(
        '1 BatchNorms stay; fathoms.swap_norms(model, "learnable_scaler") makes'
    )


def test_a_shift_before_a_scale_is_not_called_computed():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.scale, self.fc = (
                nn.Parameter(torch.ones(4)),
                nn.Parameter(torch.ones(4)),
                nn.Linear(4, 2),
            )

        def forward(self, x):
            return self.fc((x + self.shift) * self.scale)

    assert fold(moved(Backwards()), images=torch.randn(2, 4))[1].left == ()


class Branching(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x if float(x.sum()) > 0 else -x)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (vit(norm="none"), None, "ViT has no learned scale to fold"),
        (
            nn.Sequential(nn.LayerNorm(4)),
            None,
            "Sequential: its image size is not known; pass images=",
        ),
        (vit(), torch.randn(1, 3, 8, 8), "images are 8x8, the model takes 16x16"),
        (nn.Sequential(nn.LayerNorm(4)), torch.randn(1, 3), r"the model fails on images of shape \(1, 3\)"),
        (Branching(4), torch.randn(1, 4), "Branching: its forward pass cannot be traced"),
    ],
)
def test_a_model_that_cannot_be_folded_is_an_error(model, given, message):
    with pytest.raises(FathomsError, match=message):
        fold(model, images=given)


def test_a_wrong_fold_is_never_returned(monkeypatch):
    monkeypatch.setattr("fathoms.surgery.fold_absorb._absorb_into", lambda *_: None)
    with pytest.raises(FathomsError, match="the folded model differs by"):
        fold(vit())
    _, report = fold(vit(), verify=False)
    assert report.difference is None


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "scalenorm", "dyt", "derf"])
def test_a_folded_norm_keeps_its_class_without_gain_and_shift_and_can_be_swapped(norm):
    model = vit(norm=norm)
    folded, report = fold(model)
    assert {row.became for row in report if "norm" in row.name} == {"statistics only"}
    kept = [site.module for site in norms(folded)]
    assert {type(module) for module in kept} == {type(model.norm)}
    assert not any(
        hasattr(m, name) and getattr(m, name) is not None for m in kept for name in ("weight", "g")
    )
    assert folded.norm.flop_count(1) == model.norm.flop_count(1) - 24
    swap_norms(folded, "learnable_scaler")
    assert {site.kind for site in norms(folded)} == {"learnable_scaler"}


class Affine(nn.Module):
    """A scale and a shift of another library, as two parameters of one module."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.scale + self.shift


def test_parts_that_touch_once_another_has_gone_are_folded_too():
    """The norm's tail goes first; the chain of scales after it is found anew after each fold."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), Affine(), Affine(), Affine(), nn.Linear(4, 4))
    folded, report = fold(moved(model), images=torch.randn(2, 4))
    assert {row.name for row in report} == {"0.weight, bias", *[f"{i}.scale, shift" for i in (2, 3, 4)]}
    assert [type(module) for module in folded[2:5]] == [nn.Identity] * 3


def test_a_folded_model_saves_and_loads(tmp_path):
    folded, _ = fold(vit(**CAIT))
    save_weights(folded, tmp_path / "folded.safetensors")
    twin, _ = fold(vit(**CAIT))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    load_weights(twin, tmp_path / "folded.safetensors")
    assert torch.equal(twin(images()), folded(images()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_models_of_other_dtypes_fold_within_their_rounding(dtype):
    folded, report = fold(vit(**CAIT).to(dtype))
    assert folded(images().to(dtype)).dtype == dtype
    assert report.difference < (1e-10 if dtype == torch.float64 else 0.05)


def test_a_folded_model_runs_in_bfloat16_and_trains():
    folded, _ = fold(vit(residual="layerscale"))
    assert copy.deepcopy(folded).bfloat16()(images().bfloat16()).isfinite().all()
    folded.train()(images()).square().sum().backward()
    assert all(parameter.grad is not None for parameter in folded.parameters())


@pytest.mark.compile
def test_a_folded_model_compiles_and_exports():
    folded, _ = fold(vit(**CAIT))
    compiled = torch.compile(folded, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(images()), folded(images()), atol=1e-5)
    program = torch.export.export(folded, (images(),))
    assert torch.allclose(program.module()(images()), folded(images()), atol=1e-5)


class Normed(nn.Module):
    """A norm with a shift, then an attention without biases."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        y = self.norm(x)
        return self.fc(x + self.attention(y, y, y, need_weights=False)[0])


def test_an_attention_without_biases_gets_none():
    _, report = fold(Normed().eval(), images=torch.randn(2, 4, 8))
    ((name, why),) = report.left
    assert name == "norm.weight, bias"
    assert "has no bias, and no place for one" in why


class Scales(nn.Module):
    """Two scales and shifts of maps in a row."""

    def __init__(self):
        super().__init__()
        self.values = nn.ParameterList(torch.randn(4, 1, 1) for _ in range(4))

    def forward(self, x):
        a, b, c, d = self.values
        return ((x * a + b) * c + d).relu()


def test_scales_of_maps_fold_into_each_other():
    model, x = Scales(), torch.randn(2, 4, 5, 5)
    folded, report = fold(model, images=x)
    assert len(report) == 1
    assert torch.allclose(folded(x), model(x), atol=1e-5)


def test_a_fold_leaves_the_random_state_as_it_was():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    nn.init.normal_(model[1].weight)
    state = torch.get_rng_state()
    fold(model, images=torch.ones(2, 6))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("by", ["mul", "div"])
def test_a_constant_between_a_scale_and_its_matrix_is_kept(by):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = LearnableScaler(6), nn.Linear(6, 4)

        def forward(self, x):
            y = self.norm(x)
            return self.fc(y * 4.0 if by == "mul" else y / 4.0)

    folded, report = fold(moved(Between()), images=torch.randn(2, 6))
    assert len(report) == 1
    assert report.difference < 1e-6
    assert folded.norm(torch.ones(1, 6)).equal(torch.ones(1, 6)), "the scale has gone into the matrix"


def test_torch_s_quick_path_is_as_it_was_after_a_fold():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    fold(nn.TransformerEncoder(layer, 1).eval(), images=torch.randn(2, 5, 16))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_scale_that_is_set_to_one_saves_no_operation():
    model = moved(timm.create_model("cait_xxs24_224", img_size=32, depth=1, num_classes=5))
    rows = {row.became: row.operations for row in fold(model)[1]}
    assert rows["set to one"] == 0
