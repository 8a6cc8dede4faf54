"""`fathoms.probe` and `fathoms.cost`: what the commands measure, of names, runs and modules; mistakes in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fathoms import cost, create_model, evaluate, export, predict, probe, train
from fathoms.cli.main import main
from fathoms.errors import FathomsError
from fathoms.verbs import Run


class Plain(nn.Module):
    """A ViT of torch's own layers, for grey images of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 2, 2)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        return self.head(self.layers(self.patch(images).flatten(2).transpose(1, 2)).mean(1))


def printed(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_signal_and_the_verdict_are_the_commands(capsys):
    signal = probe("vit_digits", depth=2, residual="layerscale", lr=0.002)
    flags = ("--depth", "2", "--residual", "layerscale", "--lr", "0.002")
    told = printed(capsys, "probe", "vit_digits", *flags)
    assert json.loads(json.dumps(signal.to_json()))["sites"] == told["sites"]
    assert str(signal.verdict()).splitlines() == told["words"]
    assert repr(signal).startswith("Signal(2 blocks, loss 2.")
    assert "Start: " in signal._repr_html_()
    assert signal.plot().axes


def test_a_run_has_a_drift_and_a_module_the_verdict_of_its_first_steps(tmp_path):
    small = {"epochs": 2, "warmup_epochs": 0, "depth": 1, "dim": 16, "heads": 2, "device": "cpu"}
    run = train(**small, probe_interval=2, output=str(tmp_path), show=False)
    assert probe(run).verdict().outcome in ("steady", "drifts")
    torch.manual_seed(0)
    module = Plain()
    before = module.head.weight.clone()
    signal = probe(module, image_size=8, steps=3)
    assert (signal.depth, signal.verdict().basis.count("3 steps")) == (3, 1)
    assert torch.equal(before, module.head.weight)
    own = create_model("vit_digits", depth=1)
    assert probe(own, torch.randn(4, 1, 8, 8)).verdict().outcome == "not judged"


def test_the_cost_is_the_commands_and_counts_torchs_own_layers(capsys):
    found = cost("vit_digits", depth=2, device="cpu").found
    told = printed(capsys, "cost", "vit_digits", "--depth", "2", "--device", "cpu")
    counted = ("parameters", "multiplications", "saved_bytes", "training_bytes")
    assert [found[key] for key in counted] == [told[key] for key in counted]
    plain = cost(Plain(), image_size=8, device="cpu")
    # Three layers on 16 tokens of 16 channels: four projections, and the logits and sums of two heads.
    assert plain.found["parts"]["attention"]["multiplications"] == 3 * (4 * 16 * 16 * 16 + 2 * 16 * 16 * 16)
    assert plain.table().startswith("Plain: 0.01 M parameters")
    assert "training memory" in plain._repr_html_()
    assert repr(plain).startswith("Costs(Plain: ")
    assert len(plain.plot().axes) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: probe("vit_digit"), "did you mean the model 'vit_digits'?"),
        (lambda: probe("vit_digits", dept=3), "probe: no setting is called 'dept'; did you mean 'depths'?"),
        (lambda: probe(Plain()), "image_size: give the side of the images that your module takes"),
        (lambda: probe(Plain(), image_size=8, depth=3), "--depth: a module has no such switch; leave it out"),
        (lambda: probe("vit_digits", torch.randn(2, 1, 8, 8)), "a batch of images goes with a module alone"),
        (lambda: probe("vit_digits", light=True), "labels, optimizer and light go with images"),
        (lambda: probe("vit_digits", depths="2,4"), "--depths: is for the command line"),
        (lambda: probe("vit_digits", steps=-1), "--steps -1: use 0 or more"),
        (lambda: cost("vit_digits", images=5), "--images would not be used: it goes with --recipe"),
        (lambda: cost("vit_digits", batch_size=0), "--batch-size 0: use 1 or more"),
    ],
)
def test_a_mistake_is_one_line(call, message):
    with pytest.raises(FathomsError) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class Colour(Plain):
    """The same for colour images."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 2, 2)


def test_a_run_of_a_module_of_your_own_is_evaluated_probed_exported_and_classifies(tmp_path):
    settings = {"epochs": 1, "warmup_epochs": 0, "device": "cpu", "show": False, "output": str(tmp_path)}
    run = train(model=Colour(), image_size=8, **settings)
    assert evaluate(run).top1 == pytest.approx(run.summary["test"]["top1"])
    assert (probe(run).depth, cost(run).found["parameters"]) == (
        3,
        sum(map(torch.numel, run.model.parameters())),
    )
    assert max(export(run, tmp_path / "own.onnx").differences.values()) < 1e-4
    Image.new("L", (8, 8)).save(tmp_path / "grey.png")
    assert len(predict(run, [tmp_path / "grey.png"], top=3)[0].classes) == 3
    with pytest.raises(FathomsError, match="--depth: a module has no such switch; leave it out"):
        probe(run, depth=3)
    with pytest.raises(
        FathomsError, match="its model Colour is a module of Python code; give that to"
    ) as error:
        evaluate(Run(run.path))
    assert "\n" not in str(error.value)
    again = Run(run.path)
    again.model = run.model
    assert evaluate(again).top1 == evaluate(run).top1


@pytest.mark.plain
@pytest.mark.parametrize("images", [np.zeros((2, 1, 8, 8), np.float32), [[0.0]]])
def test_images_that_are_no_tensor_are_one_line(images):
    with pytest.raises(FathomsError, match=r"probe: images are a .*; give a tensor") as error:
        probe(Plain(), images)
    assert "\n" not in str(error.value)
