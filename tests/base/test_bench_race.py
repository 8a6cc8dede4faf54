"""fathoms.bench: contenders in turns, the median, and the update of `fathoms train` around each."""

from __future__ import annotations

import itertools
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fathoms import ViT, ViTConfig
from fathoms.bench import (
    RECIPE,
    TIMM_SETTINGS,
    Contender,
    Setting,
    modes_of,
    prepare_modes,
    quicker,
    race,
    training_update,
)
from fathoms.data import Batch
from fathoms.errors import FathomsError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
CONFIG = ViTConfig(image_size=8, patch_size=4, dim=16, heads=2, depth=2, num_classes=4)


def a_model():
    torch.manual_seed(0)
    return ViT(CONFIG)


def a_batch(spoilt=False):
    torch.manual_seed(1)
    images = torch.randn(6, 3, 8, 8)
    if spoilt:
        images[0, 0, 0, 0] = float("nan")
    return Batch(images, torch.arange(6) % 4, torch.arange(6), epoch=0, number=0)


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def test_contenders_take_turns():
    order = []
    contenders = [Contender(name, lambda name=name: order.append(name)) for name in ("a", "b")]
    result = race(contenders, batch=8, turns=2, steps=3)
    assert [name for name, _ in itertools.groupby(order)] == ["a", "b", "a", "b"]
    assert result["a"]["images_per_second"] == pytest.approx(8 / (result["a"]["ms"] / 1e3))


def test_the_median_turn_counts(monkeypatch):
    seconds = iter([1.0, 9.0, 2.0])
    monkeypatch.setattr("fathoms.bench.seconds", lambda *_: next(seconds))
    row = race([Contender("a", lambda: None)], batch=10, turns=3)["a"]
    assert row["ms"] == 2000.0
    assert row["spread"] == pytest.approx(4.0)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_a_measured_update_trains_the_model(precision):
    model = a_model()
    before = weights(model)
    update = training_update(model, Setting(precision, "none", "eager"), CPU)
    for _ in range(3):
        update(a_batch())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_a_measured_update_holds_back_what_is_not_finite():
    model = a_model()
    before = weights(model)
    update = training_update(model, Setting("fp32", "none", "eager"), CPU)
    update(a_batch(spoilt=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_a_measured_update_follows_the_recipe():
    moved = {}
    for decay in (0.0, 0.5):
        model = a_model()
        recipe = RECIPE.replace(opt="momentum", lr=0.1, weight_decay=decay, clip_grad=1e-9)
        training_update(model, Setting("fp32", "none", "eager"), CPU, recipe=recipe)(a_batch())
        start = weights(a_model())
        moved[decay] = {name: tensor - start[name] for name, tensor in weights(model).items()}
    # Clipped to nothing, only the weight decay of the group of matrices is left.
    assert all(tensor.abs().max() < 1e-6 for tensor in moved[0.0].values())
    assert moved[0.5]["blocks.0.attn.qkv.weight"].abs().max() > 1e-4
    assert moved[0.5]["norm.weight"].abs().max() < 1e-6


def test_shares_count_a_backward_pass_twice(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    shares_of_limit = runpy.run_path(str(BENCHMARKS / "timing.py"))["shares_of_limit"]
    limits = {"matrix_tflops": 1.0, "copy_tbps": 1.0}
    train = shares_of_limit(10**9, 1.0, 100.0, limits, "train")
    infer = shares_of_limit(10**9, 1.0, 100.0, limits, "infer")
    assert train["matrix_share"] == pytest.approx(0.06)
    assert infer["matrix_share"] == pytest.approx(0.02)
    assert train["bytes_share"] == pytest.approx(2 * 2**30 / 1e9 / 100)


@pytest.mark.parametrize(
    "words", [{"precision": "bf17"}, {"compile": "all"}, {"launch": "now"}, {"keep": "some"}]
)
def test_unknown_settings_are_refused_under_their_flag(words):
    with pytest.raises(FathomsError, match=f"^--{next(iter(words))}: no .* is called"):
        Setting(**words)


def test_a_table_can_be_written_when_no_row_has_succeeded(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = runpy.run_path(str(BENCHMARKS / "models.py"))
    assert "| cait | failed: out of memory |" in script["as_table"](
        {"rows": {"cait": {"failed": "out of memory"}}}
    )


def test_timm_is_raced_in_both_modes_on_a_gpu_and_the_quicker_counts():
    train = TIMM_SETTINGS["train"]
    assert [each.mode for each in modes_of(train, cuda=True)] == ["default", "reduce-overhead"]
    assert modes_of(train, cuda=False) == [train]
    assert modes_of(Setting(), cuda=True) == [Setting()]
    by_block = replace(train, compile="blocks")
    assert modes_of(by_block, cuda=True) == [by_block]
    rows = {"timm, default": {"images_per_second": 4308.0}, "fathoms": {"images_per_second": 8100.0}}
    assert quicker(rows, "timm", {"reduce-overhead": "no"})["failed"] == {"reduce-overhead": "no"}
    rows["timm, reduce-overhead"] = {"images_per_second": 6402.0}
    best = quicker(rows, "timm", {})
    assert (best["compile_mode"], best["images_per_second"]) == ("reduce-overhead", 6402.0)
    assert best["modes"] == {"default": 4308.0, "reduce-overhead": 6402.0}


@pytest.mark.plain
def test_a_mode_that_fails_is_named_and_the_default_one_is_not_forgiven(monkeypatch):
    def prepare(name, *rest):
        if rest[-1].mode == broken:
            raise RuntimeError("a graph\nbroke")
        return Contender(name, lambda: None)

    monkeypatch.setattr("fathoms.bench.prepare", prepare)
    on_gpu = type("Images", (), {"is_cuda": True})()
    arguments = ("timm", a_model, (on_gpu, None), "train", TIMM_SETTINGS["train"])
    broken = "reduce-overhead"
    contenders, failed = prepare_modes(*arguments)
    assert [contender.name for contender in contenders] == ["timm, default"]
    assert failed == {"reduce-overhead": "a graph broke"}
    broken = "default"
    with pytest.raises(RuntimeError, match="a graph"):
        prepare_modes(*arguments)
