"""The moving average is timm's, and resumes from its weights alone."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fathoms import FathomsError
from fathoms.training.learner import Ema


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


def move(net, step):
    """New weights, and new statistics of the batch norm."""
    generator = torch.Generator().manual_seed(step)
    net.train()(torch.randn(5, 3, 8, 8, generator=generator))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.5, 0.9998, 1.0])
def test_twenty_updates_are_timms_bit_for_bit(decay, warmup):
    peer_class = pytest.importorskip("timm.utils").ModelEmaV3
    net = model()
    ema, peer = Ema(net, decay, warmup), peer_class(net, decay=decay, use_warmup=warmup)
    for step in range(1, 21):
        move(net, step)
        ema.update(net, step)
        peer.update(net, step)
        assert ema.decay_at(step) == pytest.approx(peer.get_decay(step), rel=1e-12)
    for name, value in peer.module.state_dict().items():
        # The warm-up's decay is the same power written otherwise: it may round in the last bit.
        assert torch.allclose(ema.module.state_dict()[name], value, rtol=1e-6, atol=1e-7), name
        assert warmup or torch.equal(ema.module.state_dict()[name], value), name


def test_a_run_warms_its_average_up_as_timm_does_from_the_first_update_on(tiny_runs):
    """Four epochs of one update each, whose checkpoints are all kept."""
    peer_class = pytest.importorskip("timm.utils").ModelEmaV3
    words = ["--model-ema", "--model-ema-warmup", "--epochs", "4", "--batch-size", "256"]
    words += ["--checkpoint-hist", "9"]
    tiny_runs.train(*words, "--lr", "1e-2", "--warmup-epochs", "0")
    folders = [f"update-{number:08d}" for number in (1, 2)] + ["previous", "last"]
    saved = [tiny_runs.weights(which=folder) for folder in folders]
    name = "blocks.0.attn.qkv.weight"
    net = nn.ParameterList([saved[0][f"model/{name}"]])
    peer = peer_class(net, use_warmup=True)
    for number, tensors in enumerate(saved, start=1):
        net[0].data.copy_(tensors[f"model/{name}"])
        peer.update(net, number)
        assert torch.allclose(peer.module[0], tensors[f"ema/{name}"], rtol=1e-6, atol=1e-8), number


def test_it_resumes_bit_for_bit_from_its_weights(tmp_path):
    net = model()
    straight, first = Ema(net, 0.9, warmup=True), Ema(net, 0.9, warmup=True)
    for step in range(1, 6):
        move(net, step)
        straight.update(net, step)
        first.update(net, step)
    save_file(first.module.state_dict(), tmp_path / "ema.safetensors")
    resumed = Ema(net, 0.9, warmup=True)
    resumed.module.load_state_dict(load_file(tmp_path / "ema.safetensors"))
    for step in range(6, 11):
        move(net, step)
        straight.update(net, step)
        resumed.update(net, step)
    for name, value in straight.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name


def test_the_average_is_a_model_of_its_own():
    net = model()
    ema = Ema(net, 0.9)
    assert not ema.module.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    before = ema.module.state_dict()["0.weight"].clone()
    move(net, 1)
    assert torch.equal(ema.module.state_dict()["0.weight"], before)
    ema.update(net, 1)
    assert torch.equal(ema.module.state_dict()["0.weight"], net[0].weight)
    assert net[0].weight.requires_grad
    assert net.training


def test_a_parameter_that_two_modules_share_is_averaged_once():
    net = nn.ModuleDict({"a": nn.Linear(2, 2)})
    net["b"] = net["a"]
    ema = Ema(net, 0.5)
    ema.update(net, 1)
    start = net["a"].weight.detach().clone()
    nn.init.ones_(net["a"].weight)
    ema.update(net, 2)
    assert torch.equal(ema.module["b"].weight, start.lerp(torch.ones(2, 2), 0.5))


def test_another_model_is_refused():
    with pytest.raises(FathomsError, match="'0.bias' is in one of the two models only"):
        Ema(model()).update(nn.Linear(2, 2), 1)
