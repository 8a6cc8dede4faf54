"""The bfloat16 compute model: its matrices follow from the master weights, and its gradients reach all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.parts import NORMS
from fathoms.parts.mlp import BiasedGelu
from fathoms.parts.residuals import PLACEMENTS, RESIDUALS
from fathoms.training.master_weights import ComputeCopy
from tiny_models import LAYERSCALE, labelled_batch

FACTORS = ("norm.weight", "norm.bias", "norm.a", "norm.b", "norm.g", "scale.gamma", "scale.alpha")


def make(**switches):
    """A model whose factors are far from one and zero, so that a lost one shows."""
    torch.manual_seed(0)
    model = ViT(LAYERSCALE.replace(**switches))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(FACTORS) or name.endswith(".bias"):
                parameter.copy_(0.5 + torch.rand_like(parameter))
    return model


def gradients(model, module, copies=None, autocast=True):
    """Gradients of a model's own parameters, computed through `module`."""
    device = next(model.parameters()).device
    images, labels = (x.to(device) for x in labelled_batch())
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(module(images).float(), labels)
    loss.backward()
    if copies is not None:
        copies.pull_gradients()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_linears_are_bfloat16_and_everything_else_is_the_models_own():
    model = make()
    module = ComputeCopy(model).module
    ours, theirs = dict(model.named_parameters()), dict(module.named_parameters())
    assert all(name.endswith((*FACTORS, "fc1.bias")) for name in ours.keys() - theirs.keys())
    assert all(name.endswith("act.bias") for name in theirs.keys() - ours.keys())
    for name, parameter in theirs.items():
        linear = isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Linear | BiasedGelu)
        assert (parameter.dtype == torch.bfloat16) == linear, name
        assert (parameter is ours.get(name)) != linear, name
    assert all(parameter.dtype == torch.float32 for parameter in ours.values())


def test_blocks_of_the_copy_have_no_factors_of_channels():
    model = make()
    names = [name for name, _ in ComputeCopy(model).module.blocks.named_parameters()]
    assert [name for name in names if name.endswith(FACTORS)] == []
    assert any(name.endswith(FACTORS) for name, _ in model.blocks.named_parameters())


def allowed(norm, residual, placement, readout):
    """The switches, or None where the model refuses them, which is tested with the model."""
    switches = {"norm": norm, "residual": residual, "attn_placement": placement, "mlp_placement": placement}
    try:
        ViT(LAYERSCALE.replace(**switches, readout=readout))
    except ConfigError:
        return None
    return {**switches, "readout": readout}


NAMED = [*itertools.product(NORMS, ("layerscale",), PLACEMENTS, ("cls", "class_attention"))]
NAMED += [*itertools.product(("layernorm",), RESIDUALS, PLACEMENTS, ("cls",))]
COMBINATIONS = [switches for names in NAMED if (switches := allowed(*names)) is not None]


def test_every_norm_and_residual_method_is_among_the_combinations():
    for switch, names in (("norm", NORMS), ("residual", RESIDUALS)):
        assert {switches[switch] for switches in COMBINATIONS} == set(names)


@pytest.mark.parametrize("switches", COMBINATIONS, ids=lambda switches: "-".join(switches.values()))
def test_outputs_and_gradients_are_those_of_the_model(switches):
    plain, copied = (make(**switches) for _ in range(2))
    copies = ComputeCopy(copied, torch.float32)
    images, _ = labelled_batch()
    assert torch.allclose(copies.module(images), plain(images), rtol=1e-4, atol=1e-5)
    expected = gradients(plain, plain, autocast=False)
    got = gradients(copied, copies.module, copies, autocast=False)
    for name, value in expected.items():
        # A gradient that cancels to zero, as that of a key's bias, is rounding on both sides.
        floor = 1e-5 * max(x.norm() for x in expected.values())
        assert (got[name] - value).norm() <= 1e-4 * value.norm() + floor, name


def test_gradients_reach_the_masters_in_float32_and_agree_with_autocast():
    plain, copied = make(), make()
    copies = ComputeCopy(copied)
    expected, got = gradients(plain, plain), gradients(copied, copies.module, copies)
    for name, value in expected.items():
        assert got[name].dtype == torch.float32
        # The same bfloat16 products; only the weights' own gradients are rounded once more.
        assert (got[name] - value).norm() <= 0.02 * value.norm() + 1e-6, name
    assert all(copy.grad is None for copy in copies.copies)


def test_pulled_gradients_add_up_over_steps():
    model = make()
    copies = ComputeCopy(model)
    once = {name: grad.clone() for name, grad in gradients(model, copies.module, copies).items()}
    twice = gradients(model, copies.module, copies)
    assert all(torch.allclose(twice[name], 2 * once[name], rtol=1e-6) for name in once)


def test_pushed_weights_are_the_masters_rounded_once():
    model = make()
    copies = ComputeCopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            # Too small a change for bfloat16: it must not be lost in the masters.
            parameter.mul_(1 + 1e-4)
    kept = [master.clone() for master in copies.masters]
    copies.push_weights()
    for master, copy, before in zip(copies.masters, copies.copies, kept, strict=True):
        assert torch.equal(master, before)
        assert torch.equal(copy, master.to(torch.bfloat16))


@pytest.mark.parametrize("readout", ["cls", "class_attention"])
def test_after_a_push_outputs_and_gradients_are_those_of_the_changed_model(readout):
    plain, copied = (make(readout=readout) for _ in range(2))
    copies = ComputeCopy(copied, torch.float32)
    for model in (plain, copied):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    copies.push_weights()
    assert torch.allclose(
        copies.module(labelled_batch()[0]), plain(labelled_batch()[0]), rtol=1e-4, atol=1e-5
    )
    expected = gradients(plain, plain, autocast=False)
    got = gradients(copied, copies.module, copies, autocast=False)
    floor = 1e-5 * max(x.norm() for x in expected.values())
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 1e-4 * value.norm() + floor, name


def test_shared_parameters_are_copied_once():
    layer = nn.Linear(4, 4)
    copies = ComputeCopy(nn.Sequential(layer, layer))
    assert copies.module[0].weight is copies.module[1].weight
    assert len(copies.copies) == 2


def test_frozen_parameters_stay_frozen():
    model = make()
    model.stem.proj.weight.requires_grad_(False)
    assert not ComputeCopy(model).module.stem.proj.weight.requires_grad


def test_what_is_frozen_or_has_no_gradient_yet_gets_none():
    model = make()
    copies = ComputeCopy(model)
    copies.pull_gradients()
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen = make()
    frozen.blocks.requires_grad_(False)
    frozen.blocks[0].attn_join.norm.weight.requires_grad_()
    copies = ComputeCopy(frozen)
    got = gradients(frozen, copies.module, copies)
    given = {name for name, grad in got.items() if name.startswith("blocks.") and grad is not None}
    assert given == {"blocks.0.attn_join.norm.weight"}


def test_a_factor_of_several_linears_loses_none_of_their_gradients(monkeypatch):
    """Three linears read what a norm of class attention puts out. A GPU adds a list of pairs all at once."""

    def add_at_once(totals, added):
        for total, value in [(total, total + more) for total, more in zip(totals, added, strict=True)]:
            total.copy_(value)

    monkeypatch.setattr(torch, "_foreach_add_", add_at_once)
    check_factors("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_factor_of_several_linears_loses_none_of_their_gradients():
    check_factors("cuda")


def check_factors(device):
    """Gradients of the factors around class attention after two batches, through the model and through its copy."""
    plain, copied = (make(readout="class_attention").to(device) for _ in range(2))
    copies = ComputeCopy(copied, torch.float32)
    for _ in range(2):
        expected = gradients(plain, plain, autocast=False)
        got = gradients(copied, copies.module, copies, autocast=False)
    for name, value in expected.items():
        if name.endswith(FACTORS):
            assert (got[name] - value).norm() <= 1e-4 * value.norm(), name


def test_a_gelu_in_tanhs_form_is_not_taken_for_the_exact_one():
    model = make()
    model.blocks[1].mlp.act = nn.GELU(approximate="tanh")
    copied = ComputeCopy(model, torch.float32).module
    assert [type(block.mlp.act) for block in copied.blocks] == [BiasedGelu, nn.GELU, BiasedGelu]
    assert torch.allclose(copied(labelled_batch()[0]), model(labelled_batch()[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["attn_join.norm", "attn_join.scale", "mlp.fc1", "mlp.act", "attn.proj"])
def test_a_hook_still_sees_and_changes_what_it_saw(place):
    model = make()
    part = model.blocks[1].get_submodule(place)
    part.register_forward_hook(lambda _module, _inputs, out: 3 * out + 0.5)
    copied = ComputeCopy(model, torch.float32).module
    assert torch.allclose(copied(labelled_batch()[0]), model(labelled_batch()[0]), rtol=1e-4, atol=1e-5)


def test_a_linear_of_two_mlps_keeps_its_bias():
    model = make()
    model.blocks[1].mlp.fc1 = model.blocks[0].mlp.fc1
    copied = ComputeCopy(model, torch.float32).module
    assert [type(block.mlp.act) for block in copied.blocks] == [nn.GELU, nn.GELU, BiasedGelu]
    assert torch.allclose(copied(labelled_batch()[0]), model(labelled_batch()[0]), rtol=1e-4, atol=1e-5)


def test_a_branch_of_two_blocks_serves_both():
    model = make()
    model.blocks[1].attn = model.blocks[0].attn
    with torch.no_grad():
        model.blocks[1].attn_join.norm.weight.mul_(2)
        model.blocks[1].attn_join.scale.gamma.mul_(2)
    copied = ComputeCopy(model, torch.float32).module
    assert torch.allclose(copied(labelled_batch()[0]), model(labelled_batch()[0]), rtol=1e-4, atol=1e-5)
