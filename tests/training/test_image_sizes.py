"""Progressive image sizes: positions are resized, parameters keep their shapes, and a resume is exact."""

from __future__ import annotations

import json

import pytest
import torch

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.cli.main import main
from fathoms.models.weight_names import resize_positions
from fathoms.parts import POSITIONS
from fathoms.training.job import ImageSizes
from tiny_runs import Killed, TinyRuns, kill_before_update

SMALL = ["--depth", "2", "--dim", "16", "--heads", "2", "--batch-size", "240", "--device", "cpu"]
GROWING = [
    *SMALL,
    "--epochs",
    "4",
    "--progressive-size",
    "0:4,1:6,2:8",
    "--model-ema",
    "--model-ema-decay",
    "0.5",
]


def vit(position, size=32):
    torch.manual_seed(0)
    return ViT(ViTConfig(image_size=size, patch_size=8, dim=32, heads=2, depth=2, position=position)).eval()


@pytest.mark.parametrize("position", list(POSITIONS))
def test_a_model_takes_another_size_and_comes_back(position):
    model = vit(position)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    images = torch.randn(2, 3, 32, 32)
    before, flops = model(images), model.flop_count()
    model.set_image_size(16)
    assert model(torch.randn(2, 3, 16, 16)).shape == before.shape
    assert model.flop_count() < flops
    with pytest.raises(FathomsError, match="images are 32x32, the model takes 16x16"):
        model(images)
    model.set_image_size(64)
    assert model(torch.randn(2, 3, 64, 64)).shape == before.shape
    model.set_image_size(32)
    assert torch.equal(model(images), before)
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    with pytest.raises(FathomsError, match="20 cannot be cut into patches of 8"):
        model.set_image_size(20)


@pytest.mark.parametrize("position", ["sincos", "rope"])
def test_fixed_positions_at_another_size_are_those_of_a_model_built_for_it(position):
    model, built = vit(position), vit(position, 16)
    built.load_state_dict(model.state_dict())
    model.set_image_size(16)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(images), built(images))


def test_learned_positions_are_resized_as_loaded_ones_are_and_are_learned():
    model, built = vit("learned"), vit("learned", 16)
    state = model.state_dict()
    state["position.table"] = resize_positions(state["position.table"], 2)
    built.load_state_dict(state)
    model.set_image_size(16)
    images = torch.randn(2, 3, 16, 16)
    assert torch.allclose(model(images), built(images), atol=1e-5)
    model(images).square().sum().backward()
    assert model.position.table.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128", "write EPOCH:SIZE"),
        ("1:128,2:224", "epochs must increase from 0"),
        ("0:128,5:160,5:224", "epochs must increase"),
        ("0:120,5:224", "120 is not a multiple of the patch size 16"),
        ("0:0,5:224", "0 is not a multiple"),
        (
            "0:128,5:160",
            "ends at 160, but the model's image size is 224; end with that, or give --image-size 160",
        ),
        ("0:128,300:224", "epoch 300 is beyond the 300 epochs"),
    ],
)
def test_sizes_that_cannot_be_are_refused(text, message):
    with pytest.raises(FathomsError, match=message):
        ImageSizes(text, final=224, patch_size=16, epochs=300)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--progressive-size", "0:5,1:8"], "5 is not a multiple of the patch size 2"),
        ([__file__, "--model", "timm/resnet50", "--progressive-size", "0:128,1:224"], "fathoms models only"),
        (
            [
                "--progressive-size",
                "0:4,1:8",
                "--teacher",
                f"vit_digits={__file__}",
                "--distillation-type",
                "hard",
            ],
            "a teacher takes one image size",
        ),
    ],
)
def test_it_is_refused_in_one_line_before_anything_is_written(tmp_path, capsys, words, message):
    assert main(["train", *words, "--epochs", "3", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def growing(tmp_path):
    return TinyRuns(tmp_path, [*GROWING, "--position", "learned_rope"])


@pytest.mark.parametrize("updates", [4, 5, 8], ids=["before a change", "at a change", "in the next size"])
def test_a_run_killed_around_a_change_of_size_resumes_bit_for_bit(growing, updates):
    """1,437 images in batches of 240 are 5 updates an epoch; sizes change at updates 5 and 10."""
    often = ("--recovery-interval", "2")
    growing.train(*often, name="whole")
    cut = growing.trainer(*often, name="cut")
    kill_before_update(cut, updates)
    with pytest.raises(Killed):
        cut.run()
    seen = []
    again = growing.trainer(*often, name="cut")
    again.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    assert again.run().code == 0
    assert growing.same("cut", "whole")
    sizes = [row["image_size"] for row in growing.metrics("cut") if row["split"] == "train"]
    assert sizes == [4, 6, 8, 8]
    assert set(seen) >= {6, 8}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_result_is_that_of_the_final_size(growing, capsys, precision):
    summary = growing.train("--precision", precision).summary
    assert main(["validate", "--checkpoint", str(growing.checkpoint()), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["digits"]
    if precision == "fp32":
        assert report["top1"] == summary["test"]["top1"]
    assert report["images"] == summary["test"]["images"]
