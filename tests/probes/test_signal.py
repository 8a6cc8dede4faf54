"""The probe measures what it says, leaves the model alone, and the stored table is what it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.data.sources.digits import digits

ROOT = Path(__file__).parents[2]


def vit(**options):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "in_channels": 1, "dim": 32, "heads": 2, "num_classes": 10}
    return ViT(ViTConfig(**sizes | {"depth": 4} | options))


def batch():
    images, labels = digits()
    return images[:32], labels[:32]


def test_rows_come_block_by_block_with_both_branches():
    signal = fathoms.probe(vit(readout="class_attention", residual="layerscale"), *batch())
    names = [(site.block, site.branch) for site in signal]
    expected = [f"blocks.{index}" for index in range(4)] + [f"readout.blocks.{index}" for index in range(2)]
    assert names == [(name, branch) for name in expected for branch in ("attn", "mlp")]
    assert len(signal.table().splitlines()) == 1 + len(signal)
    assert json.loads(json.dumps(signal.to_json()))["sites"][0]["block"] == "blocks.0"


def test_numbers_agree_with_a_measure_by_hand():
    model = vit(residual="layerscale", residual_init=0.5).eval()
    images, labels = batch()
    tokens = model.embed(images)
    block = model.blocks[0]
    added = block.attn_join.scale(block.attn(block.attn_join.enter(tokens)))
    middle = (tokens + added).detach().requires_grad_()
    x = block.mlp_join(middle, block.mlp(block.mlp_join.enter(middle)))
    for later in model.blocks[1:]:
        x = later(x)
    torch.nn.functional.cross_entropy(model.forward_head(model.norm(x)), labels).backward()
    site = fathoms.probe(model, images, labels)[0]
    assert site.stream == pytest.approx(tokens.square().mean().sqrt().item(), rel=1e-5)
    assert site.added == pytest.approx(added.square().mean().sqrt().item(), rel=1e-5)
    assert site.ratio == pytest.approx(site.added / site.stream, rel=1e-5)
    assert site.gradient == pytest.approx(middle.grad.norm().item(), rel=1e-4)


def test_the_model_is_left_as_it_was():
    model = vit(drop_path=0.5).train()
    model.blocks[1].eval()
    images, labels = batch()
    model(images).sum().backward()
    modes = [module.training for module in model.modules()]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    first, second = fathoms.probe(model, images, labels), fathoms.probe(model, images, labels)
    assert first == second
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(module._forward_hooks for module in model.modules())


def test_labels_are_optional_and_foreign_models_refused():
    images, _ = batch()
    assert fathoms.probe(vit(), images) == fathoms.probe(vit(), images)
    with pytest.raises(FathomsError, match="Linear has no fathoms blocks; give a fathoms model"):
        fathoms.probe(torch.nn.Linear(3, 3), images)


@pytest.mark.parametrize("depth", [12, 48])
def test_layerscale_at_the_start_lets_the_stream_through(depth):
    """By network depth: each branch adds about its init_value, and the gradient reaches the first block."""
    signal = fathoms.probe(vit(depth=depth, residual="layerscale"), *batch())
    bound = 0.1 if depth == 12 else 1e-5
    assert all(site.ratio < bound for site in signal)
    assert signal.gradient_ratio == pytest.approx(1.0, rel=0.5)


def test_zero_scales_add_exactly_nothing():
    for residual in ("layerscale", "rezero", "skipinit", "fixup"):
        signal = fathoms.probe(vit(residual=residual, residual_init=0.0), *batch())
        assert all(site.added == 0.0 for site in signal), residual


def test_an_unscaled_stack_without_norms_explodes_and_json_can_say_so():
    signal = fathoms.probe(vit(depth=48, norm="none", residual="rezero", residual_init=1.0), *batch())
    assert signal.growth > 1e6
    text = json.dumps(signal.to_json(), allow_nan=False)
    assert json.loads(text)["sites"][-1]["stream"] > 1e4
    assert fathoms.probe(vit(depth=48, norm="none", residual="rezero"), *batch()).growth == 1.0


def test_the_stored_table_is_what_the_script_measures():
    """One row of each method at depth 12; 2 % for another CPU's rounding."""
    import runpy

    script = runpy.run_path(str(ROOT / "benchmarks" / "signal_at_init.py"))
    stored = json.loads((ROOT / "results" / "signal_at_init.json").read_text())
    rows = {(row["form"], row["residual"]): row for row in stored["rows"] if row["depth"] == 12}
    assert len(rows) == len(script["cases"]())
    for form, residual, options in script["cases"]():
        measured = script["measure"](12, residual, options)
        for key in ("ratio", "gradient"):
            assert measured[key] == pytest.approx(rows[form, residual][key], rel=0.02, abs=1e-9), (
                form,
                residual,
            )
