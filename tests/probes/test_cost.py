"""Costs by part add up to the whole, and agree with counts by hand."""

from __future__ import annotations

import json

import pytest
import torch

from fathoms import ViT, ViTConfig
from fathoms.cli.main import main
from fathoms.optimizer_facts import takes_muon
from fathoms.probes.part_costs import matrix_speed, measure_cost, part_of, training_memory, update_memory

CONFIG = ViTConfig(image_size=16, patch_size=4, dim=32, heads=2, depth=3, num_classes=5)


def model():
    torch.manual_seed(0)
    return ViT(CONFIG)


def test_parameters_and_multiplications_are_those_of_the_formulas():
    vit = model()
    cost = measure_cost(vit, torch.randn(2, 3, 16, 16))
    assert cost.total("parameters") == sum(p.numel() for p in vit.parameters())
    tokens, dim = 17, 32
    block = {"attention": tokens * dim * 3 * dim + 2 * tokens**2 * dim + tokens * dim * dim}
    block["mlp"] = 2 * tokens * dim * 4 * dim
    for name, one in block.items():
        assert cost.parts[name].multiplications == pytest.approx(3 * one)
    assert cost.parts["stem"].multiplications == pytest.approx(16 * 48 * dim)
    # The model's own count also has norms, activations and the softmax.
    assert 0.9 < cost.total("multiplications") / vit.flop_count() < 1


def test_saved_bytes_are_per_image_and_smaller_in_bfloat16():
    vit = model()
    few, many = (measure_cost(vit, torch.randn(count, 3, 16, 16)) for count in (2, 8))
    assert few.total("saved") == pytest.approx(many.total("saved"), rel=0.05)
    # At the least: two norm inputs, q, k, v, the attention's output, and both sides of the GELU.
    assert many.total("saved") > 3 * 17 * 32 * 4 * (2 + 3 + 1 + 8)
    mixed = measure_cost(vit, torch.randn(8, 3, 16, 16), torch.bfloat16)
    assert mixed.total("saved") < 0.9 * many.total("saved")


def test_autocasts_copies_of_the_weights_are_counted_once_and_not_by_image():
    vit = model()
    weights = 2 * sum(p.numel() for p in vit.parameters() if p.dim() > 1)
    one, many = (measure_cost(vit, torch.randn(count, 3, 16, 16), torch.bfloat16) for count in (1, 8))
    assert one.total("saved") == pytest.approx(many.total("saved"), rel=0.01)
    for cost in (one, many):
        assert cost.total("fixed") == pytest.approx(weights, rel=0.1)
    assert abs(measure_cost(vit, torch.randn(2, 3, 16, 16)).total("fixed")) < 0.01 * weights


def test_the_model_is_left_as_it_was_and_times_are_measured():
    vit = model().train()
    cost = measure_cost(vit, torch.randn(2, 3, 16, 16))
    assert all(module.training for module in vit.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in vit.modules())
    assert all(p.grad is None for p in vit.parameters())
    assert cost.parts["attention"].seconds > 0
    assert cost.parts["attention"].floor == pytest.approx(cost.parts["attention"].multiplications / cost.peak)
    assert matrix_speed(torch.device("cpu"), torch.float32) > 1e7


def test_the_same_weights_in_timm_cost_the_same():
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=3, num_classes=5
    )
    ours, other = (measure_cost(m, torch.randn(1, 3, 16, 16)) for m in (model(), theirs))
    assert other.total("multiplications") == pytest.approx(ours.total("multiplications"))
    assert other.parts["mlp"].parameters == ours.parts["mlp"].parameters


def test_parts_are_told_by_name():
    assert part_of("layers.0.blocks.1.mlp.fc1", ["layers.0.blocks.1"]) == "mlp"
    assert part_of("patch_embed.proj", ["blocks.0"]) == "stem"
    assert part_of("blocks.10.attn", ["blocks.1", "blocks.10"]) == "attention"


def test_training_memory_adds_state_and_activations():
    assert training_memory(1000, 8000, 50.0, 10, "fp32") == 1000 * 16 + 500
    assert training_memory(1000, 8000, 50.0, 10, "bf16") == 1000 * 20 + 500
    assert training_memory(1000, 8000, 50.0, 10, "autocast", fixed=7.0) == 1000 * 16 + 500 + 7


def test_an_update_counts_the_state_that_muon_keeps():
    images = torch.randn(1, 3, 16, 16)
    memory = {opt: update_memory(model(), images, 4, "fp32", opt) for opt in ("adamw", "muon", "sgd")}
    matrices = sum(p.numel() for name, p in model().named_parameters() if takes_muon(name, p.shape))
    others = [p for name, p in model().named_parameters() if not takes_muon(name, p.shape)]
    counters = 4 * len(others)
    assert memory["muon"] - memory["sgd"] == 4 * sum(p.numel() for p in others) + counters
    assert memory["adamw"] - memory["muon"] == 4 * matrices + 4 * len([*model().parameters()]) - counters


def test_the_command_prints_a_table_and_the_hours_of_a_recipe(capsys, tmp_path):
    words = [
        "cost",
        "--depth",
        "2",
        "--dim",
        "16",
        "--heads",
        "2",
        "--device",
        "cpu",
        "--measured-batch",
        "2",
    ]
    assert main([*words, "--recipe", "digits", "--images", "1000"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("vit_digits: ")
    assert "recipe digits: " in text
    assert "of 1,000 images" in text
    (tmp_path / "r.toml").write_text(
        'opt = "muon"\nprecision = "bf16"\nepochs = 3\ncooldown_epochs = 2\nbatch_size = 300\n'
        "grad_accum_steps = 2\n"
    )
    assert main([*words, "--recipe", str(tmp_path / "r.toml"), "--images", "1000", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out.splitlines()[-1])["recipe"]
    # Three full batches of 300 an epoch make two updates; the cool-down comes after the three epochs.
    assert (asked["epochs"], asked["updates"]) == (5, 10)
    assert (asked["policy"], asked["optimizer"]) == ("bf16", "muon")
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["training_bytes"]["autocast"] < found["training_bytes"]["fp32"]
    assert found["fixed_bytes"]["autocast"] > found["fixed_bytes"]["bf16"]
    assert main(["cost", "--images", "0"]) == 2
    assert "--images 0: use 1 or more" in capsys.readouterr().err
    assert main(["cost", "--images", "100"]) == 2
    assert "--images would not be used: it goes with --recipe; add that" in capsys.readouterr().err
