"""Swap: norms of fathoms, timm, torchvision and transformers models."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

import fathoms
from fathoms import FathomsError, norms
from fathoms.parts import NORMS, LearnableScaler, LearnableScaler2d
from fathoms.surgery.new_norm import fit
from fathoms.surgery.swap import swap_norms
from tiny_models import perturbed_vit as vit
from tiny_models import random_images as images


def kinds(model):
    return {site.kind for site in norms(model)}


@pytest.mark.parametrize("to", [name for name in NORMS if name != "layernorm"])
@pytest.mark.parametrize("how", ["keep", "reset", "calibrate"])
def test_every_norm_can_replace_a_layernorm_in_every_way(to, how):
    model = vit(stem_norm="none")
    report = swap_norms(model, to, calibrate=images(), how=how)
    assert len(report) == 5
    assert kinds(model) <= {to}
    assert model.config.norm == to
    assert model(images()).isfinite().all()
    assert report.output_change > 0
    assert all(row.fit_error is not None and row.old == "LayerNorm" for row in report)
    assert len(report.table().splitlines()) == 1 + 5 + 2
    assert report.to_json()["how"] == how


def test_calibrate_fits_better_than_keep_and_reset_at_the_first_site():
    errors = {}
    for how in ("keep", "reset", "calibrate"):
        report = swap_norms(vit(), "dyt", calibrate=images(), how=how)
        errors[how] = report.rows[0].fit_error
    assert errors["calibrate"] < min(errors["keep"], errors["reset"])


def test_calibrate_recovers_an_affine_map_exactly():
    """A frozen BatchNorm is a line, so the least-squares line is that line, to float32's rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model(images(64))
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    model.eval()
    expected = model(images())
    report = swap_norms(model, "learnable_scaler", calibrate=[images(32)])
    assert report.how == "calibrate"
    assert report.rows[0].fit_error < 1e-5
    assert torch.allclose(model(images()), expected, atol=1e-5)


@pytest.mark.parametrize("to", ["learnable_scaler", "layernorm", "rmsnorm", "dyt", "derf"])
def test_calibrate_leaves_an_error_that_is_orthogonal_to_what_the_new_norms_give(to):
    """The normal equations of least squares, with the inputs of the network whose earlier sites are swapped already."""
    torch.manual_seed(0)
    norms = (nn.RMSNorm(6), nn.RMSNorm(6)) if to == "layernorm" else (nn.LayerNorm(6), nn.LayerNorm(6))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(48, 6), norms[0], nn.Linear(6, 6), nn.GELU(), norms[1]
    ).double()
    batches = [3 * torch.randn(64, 3, 4, 4, dtype=torch.float64) for _ in range(2)]
    everything = torch.cat(batches)
    old = model(everything)
    swap_norms(model, to, calibrate=batches)
    new = model(everything)
    left = old - new
    assert left.square().mean() > 1e-4 * old.square().mean(), "nothing is left: this shows nothing"
    assert (left * new).mean(0).abs().max() < 1e-9
    assert to == "rmsnorm" or left.mean(0).abs().max() < 1e-9


def test_keep_copies_scale_and_shift_there_and_back():
    model = vit()
    before = model(images())
    swap_norms(model, "learnable_scaler")
    assert torch.equal(model.norm.a, vit().norm.weight)
    swap_norms(model, "layernorm")
    assert torch.equal(model(images()), before)
    assert model.config == vit().config


def test_keep_reports_what_has_no_place():
    report = swap_norms(vit(), "rmsnorm")
    assert {row.note for row in report} == {"has no place for the old shift"}
    report = swap_norms(vit(), "scalenorm")
    assert {row.note for row in report} == {"has no place for the old scale and shift"}


def test_a_resnets_frozen_batchnorms_become_scalers_that_compute_the_same():
    torch.manual_seed(0)
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], 5)
    model(images(8, 32))
    model.eval()
    expected = model(images(2, 32))
    report = swap_norms(model, "learnable_scaler", calibrate=images(2, 32), how="keep")
    assert len(report) == 12
    assert kinds(model) == {"learnable_scaler"}
    assert isinstance(model.bn1, LearnableScaler2d)
    assert report.output_change < 1e-5
    assert torch.allclose(model(images(2, 32)), expected, atol=1e-5)


PEERS = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 32, "depth": 2},
    "cait_xxs24_224": {"img_size": 32, "depth": 2},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "vit_small_patch14_dinov2": {"img_size": 28, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "poolformer_s12": {},
}


@pytest.mark.parametrize("to", ["learnable_scaler", "rmsnorm"])
@pytest.mark.parametrize("name", PEERS)
def test_all_norms_of_a_timm_model_are_found_and_swapped(name, to):
    model = timm.create_model(name, num_classes=5, **PEERS[name]).eval()
    size = PEERS[name].get("img_size", 32)
    names = [
        n for n, m in model.named_modules() if "norm" in type(m).__name__.lower() and not list(m.children())
    ]
    report = swap_norms(model, to, calibrate=images(8, size))
    assert {row.name for row in report} == set(names)
    assert model(images(2, size)).isfinite().all()
    # EVA has biases that start at zero.
    assert all(note.startswith("zero, and so compared") for note in report.notes)


@pytest.mark.parametrize(
    "build", [torchvision.models.vit_b_32, torchvision.models.swin_t], ids=["vit", "swin"]
)
def test_torchvision_models_are_swapped_too(build):
    with torch.device("meta"):
        model = build()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    report = swap_norms(model, "learnable_scaler")
    assert [row.name for row in report] == names
    assert kinds(model) == {"learnable_scaler"}


@pytest.mark.parametrize("name", ["ViT", "Dinov2"])
def test_transformers_models_are_swapped_too(name):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = getattr(transformers, f"{name}Config")(**sizes, image_size=16, patch_size=8)
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    names = {site for site, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    report = swap_norms(model, "learnable_scaler", calibrate=images())
    assert {row.name for row in report} == names
    assert model(images()).logits.isfinite().all()


def test_a_model_built_without_memory_is_swapped_there():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))
        report = swap_norms(model, "learnable_scaler", how="reset")
    assert [row.name for row in report] == ["1", "2"]
    assert report.line() == "2 norms swapped"


def test_only_takes_patterns_depths_and_functions():
    model = vit(depth=4)
    assert len(swap_norms(copy.deepcopy(model), "dyt", only="*.attn_join.norm")) == 4
    assert len(swap_norms(copy.deepcopy(model), "dyt", only=["norm", "blocks.0.*"])) == 3
    assert [row.name for row in swap_norms(copy.deepcopy(model), "dyt", only=range(1, 3))] == [
        f"blocks.{i}.{branch}_join.norm" for i in (1, 2) for branch in ("attn", "mlp")
    ]
    report = swap_norms(model, "dyt", only=lambda site: site.depth == 3)
    assert len(report) == 2
    assert report.notes == (
        "config: no ViTConfig describes this mixture; model.config still names the old norms",
    )


def test_depth_counts_blocks_across_the_stages_of_a_hierarchy():
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(3, 6))
    depths = {site.name: site.depth for site in norms(model)}
    assert depths["layers.0.blocks.1.norm2"] == 1
    assert depths["norm"] is None


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(nn.functional.layer_norm(x.flatten(1)[:, :16], (16,)))


class Mixed(Functional):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(super().forward(x))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(3, 3), {}, "Linear has no norm among its modules; there is nothing to swap"),
        (vit(norm="dyt"), {"to": "dyt"}, "every norm of ViT is a dyt already"),
        (vit(), {"only": "block.*"}, r"only='block.\*' matches no norm; use 'blocks"),
        (vit(), {"only": ["norm", "nrm"]}, "only='nrm' matches no norm; did you mean 'norm'"),
        (
            vit(),
            {"only": range(2, 9)},
            r"only=range\(2, 9\) holds no norm; the blocks with norms are \[0\] to \[1\]",
        ),
        (vit(), {"only": lambda _: False}, "picks none of 5 norms"),
        (vit(), {"only": []}, r"only=\[\] names none of 5 norms; see "),
        (
            vit(),
            {"to": "learnable_scalar"},
            "no norm is called 'learnable_scalar'; did you mean 'learnable_scaler'",
        ),
        (vit(), {"how": "kep"}, "no way is called 'kep'; did you mean 'keep'"),
        (vit(), {"how": "calibrate"}, "how='calibrate' needs batches; pass calibrate="),
        (vit(), {"calibrate": []}, "batches: there are none"),
        (vit(), {"calibrate": [3]}, "batches: a int is not a batch"),
        (nn.Sequential(nn.LayerNorm([4, 4])), {}, "0: it has more than one axis of channels"),
        (nn.Sequential(nn.BatchNorm2d(4)), {}, "0: a BatchNorm in training mode depends on the batch"),
        (
            nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)).eval(),
            {},
            "without running statistics",
        ),
        (
            Functional(),
            {"calibrate": images(2)},
            "Functional: calls layer_norm as a function, which cannot be swapped",
        ),
    ],
)
@pytest.mark.plain
def test_a_model_that_cannot_be_swapped_is_an_error(model, options, message):
    with pytest.raises(FathomsError, match=message):
        swap_norms(model, **{"to": "learnable_scaler", **options})


def test_a_functional_norm_in_a_model_with_norm_modules_is_noted():
    report = swap_norms(Mixed(), "learnable_scaler", calibrate=images(8))
    why = "calls layer_norm as a function, which cannot be swapped; make it a module such as nn.LayerNorm"
    assert report.left == (("", why),)
    assert report.line() == f"1 norms swapped, 1 left: the model {why}"
    assert f"the model  left  {why}" in " ".join(report.table().split(" " * 3)) or why in report.table()


def test_a_norm_the_batches_never_reach_cannot_be_calibrated():
    model = Mixed()
    model.spare = nn.LayerNorm(4)
    with pytest.raises(FathomsError, match="spare: the batches never reach this norm"):
        swap_norms(model, "dyt", calibrate=images(2))


def test_a_fit_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch):
    model = vit()
    before, state = model(images()), list(model.state_dict())
    fitted = []

    def stumble(part, pairs):
        fitted.append(part)
        if len(fitted) == 3:
            raise MemoryError
        return fit(part, pairs)

    monkeypatch.setattr("fathoms.surgery.new_norm.fit", stumble)
    with pytest.raises(MemoryError):
        swap_norms(model, "dyt", calibrate=images())
    assert kinds(model) == {"layernorm"}
    assert list(model.state_dict()) == state
    assert torch.equal(model(images()), before)


def test_a_shared_norm_stays_shared():
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    assert len(swap_norms(model, "learnable_scaler")) == 1
    assert model[0] is model[2]
    assert isinstance(model[0], LearnableScaler)


def test_mode_dtype_and_trainability_are_kept():
    model = vit().bfloat16().train()
    swap_norms(model, "learnable_scaler")
    assert model.norm.training
    assert model.norm.a.dtype == torch.bfloat16
    assert model.norm.a.requires_grad


@pytest.mark.parametrize("how", ["keep", "reset", "calibrate"])
def test_the_successor_of_a_frozen_norm_is_frozen(how):
    model = vit().requires_grad_(False)
    model.norm.requires_grad_(True)
    swap_norms(model, "dyt", calibrate=images(), how=how)
    trained = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"norm"}


def test_a_norm_without_parameters_is_frozen_if_the_model_is():
    for frozen in (False, True):
        model = nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 4))
        swap_norms(model.requires_grad_(not frozen), "learnable_scaler")
        assert model[0].a.requires_grad is not frozen


def test_the_successor_of_a_norm_without_parameters_has_the_dtype_of_the_model():
    model = nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 4)).double()
    swap_norms(model, "learnable_scaler")
    assert model[0].a.dtype == torch.float64


def test_a_start_of_the_new_norms_is_theirs_in_transformers_and_in_cnns():
    cnn = torch.nn.Sequential(torch.nn.Conv2d(3, 512, 3), torch.nn.BatchNorm2d(512), torch.nn.ReLU()).eval()
    images = torch.randn(2, 3, 8, 8)
    for to, init in (("learnable_scaler", "normal"), ("learnable_scaler:normal", None)):
        torch.manual_seed(0)
        model = copy.deepcopy(cnn)
        report = swap_norms(model, to, calibrate=images, init=init) if init else swap_norms(model, to)
        assert report.how == "reset"
        assert abs(float(model[1].a.detach().std()) - 1) < 0.1
        assert not model[1].b.detach().any()
    vit = fathoms.create_model("vit_digits", depth=1)
    swap_norms(vit, "dyt:0.8")
    assert (vit.config.norm_init, vit.blocks[0].attn_join.norm.alpha.item()) == (0.8, pytest.approx(0.8))
    swap_norms(vit, "learnable_scaler", how="reset")
    assert vit.blocks[0].attn_join.norm.a.eq(1).all()


@pytest.mark.plain
def test_a_start_that_nothing_would_use_is_refused():
    vit = fathoms.create_model("vit_digits", depth=1)
    with pytest.raises(FathomsError, match="norm 'rmsnorm' takes no init"):
        swap_norms(vit, "rmsnorm:1")
    with pytest.raises(FathomsError, match="init would not be used: how='keep'"):
        swap_norms(vit, "learnable_scaler", how="keep", init="normal")
    with pytest.raises(FathomsError, match="did you mean 'normal'"):
        swap_norms(vit, "learnable_scaler:normall")


class ReadsGain(nn.Module):
    """A model that reads a number of its norm, as Mamba reads the dtype of its gain."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(self.first(x).to(self.first.weight.dtype)))


def test_a_model_that_reads_its_norm_is_refused_in_one_line_and_left_as_it_was():
    model, x = ReadsGain(), torch.randn(6, 5, 8)
    before = model(x)
    with pytest.raises(
        FathomsError,
        match=r"fails in inference \(its own code reads weight of a LearnableScaler, which has none",
    ):
        swap_norms(model, "learnable_scaler", calibrate=x)
    assert torch.equal(model(x), before)
    assert isinstance(model.norm, nn.LayerNorm)


@pytest.mark.plain
@pytest.mark.parametrize("to", ["learnable_scaler", "dyt", "derf", "rmsnorm"])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.randn(1, 6), "1 sees 1 rows of calibrate=, fewer than the 8 that a fit needs"),
        (torch.randn(1, 6).expand(9, 6), "1 sees 9 rows of calibrate=, all the same"),
    ],
)
def test_a_fit_that_its_rows_do_not_determine_is_refused(to, x, words):
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(FathomsError, match=f"swap_norms: {words}; give more images, or how='keep'"):
        swap_norms(model, to, calibrate=x)
    assert type(model[1]) is nn.LayerNorm
    assert swap_norms(model, to, calibrate=x, how="keep")


def test_a_site_of_pooled_images_is_fitted_on_enough_of_them():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, global_pool="avg")
    with pytest.raises(FathomsError, match="fc_norm sees 4 rows of calibrate="):
        swap_norms(model, "dyt", calibrate=images(4, 32))
    assert swap_norms(model, "dyt", calibrate=[images(4, 32), images(4, 32)])


@pytest.mark.parametrize(("only", "like"), [([0, 1], range(2)), ((1,), range(1, 2)), (0, range(1))])
def test_numbers_choose_blocks_as_a_range_does(only, like):
    found = [[row.name for row in swap_norms(vit(), "dyt", only=each)] for each in (only, like)]
    assert found[0] == found[1]


@pytest.mark.plain
@pytest.mark.parametrize("to", [name for name in NORMS if name != "none"])
def test_a_network_of_maps_can_still_be_traced(to):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    swap_norms(model, to, how="reset")
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("to", ["dyt", "derf"])
def test_the_slope_of_a_curve_is_fitted(to):
    torch.manual_seed(0)
    teacher, student = NORMS.build(to, 5), NORMS.build(to, 5)
    with torch.no_grad():
        for parameter in (teacher.weight, teacher.bias):
            parameter.normal_()
        teacher.alpha.fill_(1.7)
    x = 1.5 * torch.randn(400, 5)
    fit(student, [(x, teacher(x).detach())])
    assert student.alpha.item() == pytest.approx(1.7, rel=0.03)


def test_a_model_of_words_is_given_words_of_its_own_vocabulary():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = transformers.PretrainedConfig(vocab_size=11)
            self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)

        def forward(self, input_ids):
            return self.norm(self.table(input_ids))

    model = Words()
    assert len(swap_norms(model, "learnable_scaler")) == 1
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 8)


@pytest.mark.parametrize(("bias", "note"), [(0.0, ""), (0.5, "has no place for the old shift")])
def test_a_shift_that_finds_no_place_is_named_where_it_does_something(bias, note):
    norm = nn.LayerNorm(8)
    nn.init.constant_(norm.bias, bias)
    (row,) = swap_norms(nn.Sequential(nn.Linear(8, 8), norm), "rmsnorm", how="keep")
    assert row.note == note
