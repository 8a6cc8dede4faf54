"""Norms of other libraries: what each computes decides how it is swapped, and whether it stays."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision
import transformers
from timm.layers import FilterResponseNormAct2d, LayerNorm2d, RmsNorm, SimpleNorm
from timm.layers.norm_act import (
    BatchNormAct2d,
    FrozenBatchNormAct2d,
    GroupNormAct,
    LayerNormAct,
    LayerNormAct2d,
    RmsNormAct2d,
)
from torch import nn
from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

import fathoms
from fathoms import FathomsError
from fathoms.surgery.inputs import difference, run
from tiny_models import random_images as images


def off_start(module, seed=0):
    """Every vector and running statistic away from ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise.exp() if "var" in name else tensor + 0.3 * noise)
    return module.eval()


# Every kind of site: the norm, the shape of its input, the channel axis, and its gain where that is not its weight.
SITES = {
    "LayerNorm": (nn.LayerNorm(8), (4, 5, 8), -1),
    "LayerNorm2d": (LayerNorm2d(8), (4, 8, 5, 6), 1),
    "VitDet": (VitDetLayerNorm(8), (4, 8, 5, 6), 1),
    "GroupNorm of sequences": (nn.GroupNorm(2, 8), (4, 8, 10), 1),
    "GroupNorm of one sequence": (nn.GroupNorm(2, 8), (1, 8, 10), 1),
    "GroupNorm of vectors": (nn.GroupNorm(2, 8), (4, 8), 1),
    "GroupNorm of volumes": (nn.GroupNorm(2, 8), (4, 8, 3, 4, 5), 1),
    "GroupNorm of cubes": (nn.GroupNorm(2, 8), (8, 8, 8, 8, 8), 1),
    "InstanceNorm": (nn.InstanceNorm2d(8, affine=True), (4, 8, 5, 6), 1),
    "Gemma": (Gemma2RMSNorm(8), (4, 5, 8), -1),
    "RmsNormAct2d": (RmsNormAct2d(8), (4, 8, 5, 6), 1),
    "LayerNormAct": (LayerNormAct(8), (4, 5, 8), -1),
    "LayerNormAct2d": (LayerNormAct2d(8, act_layer=nn.GELU), (4, 8, 5, 6), 1),
    "GroupNormAct": (GroupNormAct(8, num_groups=2), (4, 8, 5, 6), 1),
    "RmsNorm without weight": (RmsNorm(8, affine=False), (4, 5, 8), -1),
}
# These are a line per channel, which a scaler represents exactly.
LINES = {
    "BatchNorm1d of vectors": (nn.BatchNorm1d(8), (16, 8), 1),
    "BatchNorm1d": (nn.BatchNorm1d(8), (4, 8, 10), 1),
    "BatchNorm2d": (nn.BatchNorm2d(8), (4, 8, 5, 6), 1),
    "BatchNorm3d": (nn.BatchNorm3d(8), (4, 8, 3, 4, 5), 1),
    "SyncBatchNorm of sequences": (nn.SyncBatchNorm(8), (1, 8, 10), 1),
    "SyncBatchNorm of volumes": (nn.SyncBatchNorm(8), (8, 8, 8, 8, 8), 1),
    "BatchNormAct2d": (BatchNormAct2d(8, act_layer=nn.SiLU), (4, 8, 5, 6), 1),
    "frozen, of timm": (FrozenBatchNormAct2d(8), (4, 8, 5, 6), 1),
    "frozen, of torchvision": (torchvision.ops.FrozenBatchNorm2d(8), (4, 8, 5, 6), 1),
    "frozen, of DETR": (DetrFrozenBatchNorm2d(8), (4, 8, 5, 6), 1),
}


def network(norm):
    return nn.Sequential(off_start(copy.deepcopy(norm)), nn.Identity())


def by_hand(norm, x, axis):
    """gain * x + shift along the channel axis, then the activation, written apart from the library."""
    shape = [1] * x.ndim
    shape[axis] = -1
    gain = getattr(norm, "weight", None)
    gain = torch.ones(8) if gain is None else gain + 1 if isinstance(norm, Gemma2RMSNorm) else gain
    shift = getattr(norm, "bias", None)
    shift = torch.zeros(8) if shift is None else shift
    if getattr(norm, "running_var", None) is not None:
        eps = getattr(norm, "eps", 1e-5)
        scale = gain / (norm.running_var + eps).sqrt()
        gain, shift = scale, shift - norm.running_mean * scale
    return getattr(norm, "act", nn.Identity())(x * gain.view(shape) + shift.view(shape))


def batch(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.5


@pytest.mark.parametrize("name", SITES | LINES)
@pytest.mark.parametrize("seen", [True, False], ids=["seen running", "not seen"])
def test_a_swapped_norm_scales_and_shifts_the_channels_that_the_norm_did(name, seen):
    norm, shape, axis = (SITES | LINES)[name]
    model, x = network(norm), batch(shape)
    before = copy.deepcopy(model)
    report = fathoms.swap_norms(model, "learnable_scaler", how="keep", calibrate=x if seen else None)
    assert len(report) == 1
    assert torch.allclose(model(x), by_hand(before[0], x, axis), atol=1e-5)
    if name in LINES:
        assert torch.allclose(model(x), before(x), atol=1e-5)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("how", ["keep", "calibrate"])
def test_a_norm_that_the_scaler_represents_is_fitted_exactly(name, how):
    norm, shape, _ = LINES[name]
    model, x = network(norm), batch(shape)
    before = copy.deepcopy(model)
    report = fathoms.swap_norms(model, "learnable_scaler", how=how, calibrate=x)
    assert report.rows[0].fit_error <= 1e-6
    assert difference(run(before, x), run(model, x)) <= 1e-5


# No GroupNorm is a target of a swap.
@pytest.mark.parametrize("name", [name for name in SITES if not name.startswith(("Group", "Instance"))])
def test_a_norm_swapped_there_and_back_is_itself_again(name):
    norm, shape, _ = SITES[name]
    model, x = network(norm), batch(shape)
    kind = next(iter(fathoms.norms(model))).kind
    before = copy.deepcopy(model)
    fathoms.swap_norms(model, "learnable_scaler", how="keep")
    # There and back: gain, shift, axis and activation are those of the start.
    report = fathoms.swap_norms(model, kind, how="keep")
    assert not report.rows[0].note or kind == "rmsnorm"
    assert difference(run(before, x), run(model, x)) <= 1e-4


class Chain(nn.Module):
    """Two norms with a matrix between them; the first cannot be kept exactly."""

    def __init__(self, second):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.fc, self.b = nn.LayerNorm(8), nn.Linear(8, 8), second
        off_start(self)

    def forward(self, x):
        return self.b(self.fc(self.a(x)))


def test_the_second_site_is_fitted_to_its_own_inputs_in_the_swapped_network():
    model, x = Chain(nn.LayerNorm(8)), batch((6, 5, 8))
    before = copy.deepcopy(model)
    fathoms.swap_norms(model, "learnable_scaler", calibrate=x)
    # The fit by torch's own least squares: inputs from the network with the first scaler, outputs from the old one.
    inputs, wanted = model.fc(model.a(x)).flatten(0, 1), before(x).flatten(0, 1)
    for channel in range(8):
        columns = torch.stack([inputs[:, channel], torch.ones(len(inputs))], 1).double()
        line = torch.linalg.lstsq(columns, wanted[:, channel : channel + 1].double()).solution.flatten()
        assert torch.allclose(torch.stack([model.b.a[channel], model.b.b[channel]]).double(), line, atol=1e-4)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (SimpleNorm(8), (4, 5, 8)),
        (FilterResponseNormAct2d(8), (4, 8, 5, 6)),
        (nn.LayerNorm((5, 8)), (4, 5, 8)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_norm_that_computes_something_else_stays_and_is_listed(norm, shape):
    model = nn.Sequential(off_start(norm), nn.LayerNorm(shape[-1])).eval()
    before = copy.deepcopy(model)
    report = fathoms.swap_norms(model, "learnable_scaler", how="keep", calibrate=batch(shape))
    assert [row.name for row in report] == ["1"]
    assert [name for name, _ in report.left] == ["0"]
    assert report.left[0][1] in report.table()
    assert torch.equal(model[0](batch(shape)), before[0](batch(shape)))
    alone = nn.Sequential(copy.deepcopy(norm))
    with pytest.raises(FathomsError, match="swap_norms: no norm of Sequential can be swapped: 0: "):
        fathoms.swap_norms(alone, "learnable_scaler")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = MambaRMSNormGated(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.out(self.norm(x, x.sin()))


@pytest.mark.parametrize("seen", [True, False])
def test_a_norm_with_a_gate_stays(seen):
    model, x = Gated().eval(), batch((4, 5, 8))
    report = fathoms.swap_norms(model, "learnable_scaler", how="keep", calibrate=x if seen else None)
    assert [row.name for row in report] == ["out"]
    assert dict(report.left)["norm"].startswith(
        "it is called with 2" if seen else "it takes hidden_states, gate"
    )
    model(x)


@pytest.mark.plain
def test_a_model_that_is_a_norm_is_refused():
    with pytest.raises(FathomsError, match="LayerNorm is itself a norm"):
        fathoms.swap_norms(nn.LayerNorm(8), "dyt")


def test_only_is_read_before_a_norm_is_refused():
    model = nn.Sequential(nn.LayerNorm((4, 8)), nn.LayerNorm(8))
    assert [row.name for row in fathoms.swap_norms(model, "dyt", only="1")] == ["1"]
    with pytest.raises(FathomsError, match="^0: it has more than one axis of channels"):
        fathoms.swap_norms(nn.Sequential(nn.LayerNorm((4, 8)), nn.LayerNorm(8)), "dyt", only="0")


def test_frozen_batchnorms_of_a_timm_model_are_swapped_or_listed():
    model = timm.create_model("resnet10t", num_classes=5, channels=(8, 8, 8, 8)).eval()
    timm.utils.freeze(model, ["layer1", "layer2"])
    names = {name for name, module in model.named_modules() if "Norm" in type(module).__name__}
    report = fathoms.swap_norms(model, "learnable_scaler", how="keep", calibrate=images(2, 32))
    assert {row.name for row in report} == names
    assert report.output_change < 1e-5


def test_gemma_keeps_its_function_through_there_and_back():
    config = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 12, "intermediate_size": 96, "vocab_size": 99}
    model = transformers.Gemma2Model(transformers.Gemma2Config(**config)).eval()
    off_start(nn.ModuleList([m for m in model.modules() if isinstance(m, Gemma2RMSNorm)]))
    ids = {"input_ids": torch.arange(8)[None]}
    before, gemma = run(model, ids), copy.deepcopy(model)
    gains = {name for name, _ in model.named_parameters() if "norm" in name}
    fathoms.swap_norms(model, "learnable_scaler")
    assert run(model, ids)[0].abs().max() > 0.1
    assert set(dict(fathoms.fold(gemma, images=ids)[1].left)) == gains
    fathoms.swap_norms(model, "rmsnorm")
    assert difference(before, run(model, ids)) < 1e-5


def test_weight_standardisation_is_no_norm_of_the_network():
    model = timm.create_model("nf_resnet26", num_classes=5).eval()
    with pytest.raises(FathomsError, match="has no norm among its modules"):
        fathoms.swap_norms(model, "dyt", calibrate=images(2, 64), how="reset")


@pytest.mark.parametrize("to", ["learnable_scaler", "dyt", "rmsnorm"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_s_encoder_runs_after_a_swap(to, norm_first):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), batch((2, 5, 16))
    twin = copy.deepcopy(model)
    fathoms.swap_norms(model, to, how="keep", calibrate=x)
    fathoms.swap_norms(twin, to)
    for each in (model, twin):
        expected = each(x.requires_grad_())
        with torch.no_grad():
            assert torch.allclose(each(x), expected, atol=1e-5)
        folded, report = fathoms.fold(each, images=x.detach())
        with torch.no_grad():
            assert torch.allclose(folded(x), expected, atol=1e-4)
        assert len(report) > 0 or not norm_first


def test_a_swap_after_which_the_model_fails_is_undone():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.norm(x) / self.norm.weight.norm())

    model, x = Reads(), batch((8, 8))
    expected = model(x)
    for how in ("keep", "calibrate"):
        with pytest.raises(
            FathomsError, match="its own code reads weight of a LearnableScaler, which has none"
        ):
            fathoms.swap_norms(model, "learnable_scaler", how=how, calibrate=x)
        assert torch.equal(model(x), expected)
        assert isinstance(model.norm, nn.LayerNorm)


def hooked(norm):
    norm.register_forward_hook(lambda *_: None)


def parametrised(norm):
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Tanh())


@pytest.mark.parametrize(
    ("change", "why"), [(hooked, "it has hooks, which the new norm"), (parametrised, "it is parametrised")]
)
def test_a_norm_that_does_more_than_its_forward_stays(change, why):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    change(model[0])
    report = fathoms.swap_norms(model, "learnable_scaler", how="keep", calibrate=batch((4, 8)))
    assert [row.name for row in report] == ["2"]
    assert report.left[0][1].startswith(why)


def test_norms_that_shared_a_parameter_are_named():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    model[2].weight = model[0].weight
    report = fathoms.swap_norms(model, "rmsnorm", calibrate=batch((8, 8)))
    assert report.notes == ("0.weight and 2.weight were one parameter, and are no longer",)


def test_a_norm_that_never_ran_is_named():
    class Reads(nn.Module):
        """Takes the numbers of its norm, and never calls it."""

        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x):
            return nn.functional.layer_norm(self.out(x), (8,), self.norm.weight, self.norm.bias)

    report = fathoms.swap_norms(Reads(), "dyt", how="keep", calibrate=batch((4, 8)))
    assert [row.note for row in report] == ["never ran on these inputs", ""]
    assert dict(report.left)[""].startswith("calls layer_norm as a function")


def test_a_swap_draws_no_random_numbers_and_leaves_running_statistics():
    model = off_start(nn.Sequential(nn.Conv2d(3, 8, 1), nn.LayerNorm(32), nn.BatchNorm2d(8), nn.Dropout(0.5)))
    model.image_size = 32
    kept = {name: value.clone() for name, value in model[2].named_buffers()}
    state = torch.random.get_rng_state()
    fathoms.swap_norms(model, "dyt", only="1")
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, kept[name]) for name, value in model[2].named_buffers())
    assert not model.training


def test_a_norm_free_model_of_another_size_has_no_norm():
    with pytest.raises(FathomsError, match="has no norm among its modules"):
        fathoms.swap_norms(timm.create_model("resmlp_12_224", img_size=64), "dyt")


class Two(nn.Module):
    """Two inputs; the norm is on the second."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 4)
        off_start(self)

    def forward(self, x, y):
        return x.sum(-1, keepdim=True) + self.fc(self.norm(y))


def test_models_of_two_inputs_take_a_tuple_or_a_dict():
    x, y = batch((8, 6)), batch((8, 8))
    for given in ((x, y), {"x": x, "y": y}):
        model = Two()
        folded, report = fathoms.fold(model, images=given)
        assert len(report) == 1
        assert torch.allclose(folded(x, y), model(x, y), atol=1e-5)
        assert len(fathoms.norms(model, images=given)) == 1
    assert fathoms.swap_norms(Two(), "learnable_scaler", calibrate=[(x, y)]).rows[0].fit_error < 1
    assert fathoms.swap_norms(Two(), "dyt", calibrate={"x": x, "y": y}).output_change > 0
    for change in (
        lambda: fathoms.fold(Two(), images=x),
        lambda: fathoms.swap_norms(Two(), "dyt", calibrate=x),
    ):
        with pytest.raises(FathomsError, match="missing 1 required positional argument: 'y'"):
            change()


def test_a_text_model_needs_no_images():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50))
    assert fathoms.fold(model)[1].difference < 1e-5
    assert not fathoms.swap_norms(model, "learnable_scaler").notes


def test_a_config_whose_channels_are_those_of_its_blocks():
    sizes = {"width_coefficient": 0.3, "depth_coefficient": 0.2, "hidden_dim": 384, "image_size": 64}
    model = transformers.EfficientNetModel(transformers.EfficientNetConfig(**sizes)).eval()
    assert not fathoms.norms(model).notes
