"""The probe measures what it says, leaves the model alone, and the stored table is what it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.data.sources.arrays import digits

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


def test_growth_and_gradient_ratio_are_taken_over_the_blocks_without_the_readout():
    signal = fathoms.probe(vit(readout="class_attention", norm="none"), *batch())
    first, last = (
        next(site for site in signal if (site.block, site.branch) == place)
        for place in (("blocks.0", "attn"), ("blocks.3", "mlp"))
    )
    assert signal.growth == pytest.approx(last.stream / first.stream)
    assert signal.gradient_ratio == pytest.approx(first.gradient / last.gradient)
    assert signal.growth != pytest.approx(signal[-1].stream / first.stream, rel=1e-3)


def test_numbers_agree_with_a_measure_by_hand():
    model = vit(residual="layerscale", residual_init=0.5).eval()
    images, labels = batch()
    tokens = model.embed(images)
    block = model.blocks[0]
    added = block.attn_join.scale(block.attn(block.attn_join.enter(tokens)))
    middle = (tokens + added).detach().requires_grad_()
    x = block.mlp_join(middle, block.mlp)
    for later in model.blocks[1:]:
        x = later(x)
    torch.nn.functional.cross_entropy(model.forward_head(model.norm(x)), labels).backward()
    site = fathoms.probe(model, images, labels)[0]
    assert site.stream == pytest.approx(tokens.square().mean().sqrt().item(), rel=1e-5)
    assert site.added == pytest.approx(added.square().mean().sqrt().item(), rel=1e-5)
    assert site.ratio == pytest.approx(site.added / site.stream, rel=1e-5)
    assert site.gradient == pytest.approx(middle.grad.norm().item(), rel=1e-4)


def left(model):
    """A state that must not change: modes, gradients, hooks, weights."""
    return (
        [module.training for module in model.modules()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [p.detach().clone() for p in model.parameters()],
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    )


def same(a, b):
    return (
        str(a[0]) == str(b[0])
        and a[3] == b[3]
        and all(
            (x is None and y is None) or torch.equal(x, y)
            for i in (1, 2)
            for x, y in zip(a[i], b[i], strict=True)
        )
    )


def test_outputs_random_numbers_and_training_are_bit_identical_with_and_without_probing():
    def trained(probed):
        model = vit(drop_path=0.3).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        images, labels = batch()
        torch.manual_seed(5)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            if probed:
                before, random = left(model), torch.get_rng_state()
                fathoms.probe(model, images, labels, optimizer=optimizer)
                assert same(left(model), before)
                assert torch.equal(torch.get_rng_state(), random)
            optimizer.step()
        return model.eval()(images)

    assert torch.equal(trained(True), trained(False))


def test_a_hundred_probes_leave_no_tensors_behind():
    import gc

    model, (images, labels) = vit(depth=1), batch()
    counts = []
    for number in range(100):
        fathoms.probe(model, images[:2], labels[:2])
        if number in (10, 99):
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert counts[0] == counts[1]


def test_gradient_checkpointing_and_frozen_weights_change_no_activation():
    images, labels = batch()
    plain, again, frozen = vit(), vit(), vit().requires_grad_(False)
    again.set_grad_checkpointing()
    expected = fathoms.probe(plain, images, labels)
    assert fathoms.probe(again, images, labels) == expected
    measured = fathoms.probe(frozen, images, labels)
    assert [site.gradient for site in measured] == pytest.approx([site.gradient for site in expected])
    assert [site.weights for site in measured] == [0.0] * len(expected)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m, x: (m, x[:, :, :6]), r"images are 6x8, the model takes 8x8"),
        (lambda m, x: (m, x[:0]), r"probe: images are \(0, 1, 8, 8\); give a batch"),
        (lambda _, x: (torch.nn.Linear(3, 3), x), "Linear has no transformer blocks"),
    ],
)
def test_bad_input_is_one_line(spoil, message):
    with pytest.raises(FathomsError, match=message):
        fathoms.probe(*spoil(vit(), batch()[0]))


def test_weights_that_are_not_finite_are_named():
    model = vit()
    with torch.no_grad():
        model.blocks[2].mlp.fc1.weight[3, 4] = float("nan")
    with pytest.raises(FathomsError, match=r"blocks\.2\.mlp\.fc1\.weight holds values that are not finite"):
        fathoms.probe(model, batch()[0])


@pytest.mark.plain
def test_labels_must_fit_the_images_and_the_outputs():
    images, labels = batch()
    with pytest.raises(FathomsError, match="3 labels for 32 images"):
        fathoms.probe(vit(), images, labels[:3])
    with pytest.raises(FathomsError, match="labels reach 9, the model has 4 outputs"):
        fathoms.probe(vit(num_classes=4), images, labels)


@pytest.mark.plain
def test_wrong_types_of_images_and_labels_are_one_line():
    images, labels = batch()
    for given, message in (
        ((images.byte(),), "images are torch.uint8; give floats"),
        ((images, labels.tolist()), "labels are a list; give a tensor of classes"),
        ((images, labels.float()), r"labels are torch.float32 of shape \(32,\); give one whole number"),
        ((images, labels[:, None]), r"labels are torch.int64 of shape \(32, 1\); give one whole number"),
    ):
        with pytest.raises(FathomsError, match=message):
            fathoms.probe(vit(), *given)
    assert fathoms.probe(vit(), images, labels.int()) == fathoms.probe(vit(), images, labels)


def test_images_of_another_precision_than_the_model_are_named_as_such():
    message = "ViT is in torch.float64, the images are torch.float32; give images.to"
    with pytest.raises(FathomsError, match=message):
        fathoms.probe(vit().double(), batch()[0])


def test_inference_mode_around_the_probe_or_the_images_changes_nothing():
    model, (images, labels) = vit(), batch()
    expected = fathoms.probe(model, images, labels)
    with torch.inference_mode():
        assert fathoms.probe(model, images, labels) == expected
        made = images.clone(), labels.clone()
        assert torch.is_inference_mode_enabled()
        unable = vit()
    assert fathoms.probe(model, *made) == expected
    with pytest.raises(FathomsError, match="the weights were made under torch.inference_mode()"):
        fathoms.probe(unable, images, labels)


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


def test_labels_are_optional():
    images, _ = batch()
    assert fathoms.probe(vit(), images) == fathoms.probe(vit(), images)


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


@pytest.mark.parametrize(
    "options", [{"attn_placement": "keel", "mlp_placement": "keel"}, {"residual": "deepnorm"}]
)
def test_the_ratio_is_over_the_enlarged_stream_that_the_branch_is_added_to(options):
    placements = {} if "residual" not in options else {"attn_placement": "post", "mlp_placement": "post"}
    site = fathoms.probe(vit(**placements | options), *batch())[3]
    factor = 8.0 if "residual" not in options else 8.0**0.25
    assert site.ratio == pytest.approx(site.added / (factor * site.stream), rel=1e-6)
    assert site.parallel**2 + site.orthogonal**2 == pytest.approx(site.ratio**2, rel=1e-6)


def test_logits_in_a_plain_dict_are_found():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = vit()

        def forward(self, images):
            return {"logits": self.vit(images), "hidden": None}

    images, labels = batch()
    assert fathoms.probe(Wrapped(), images, labels).loss == fathoms.probe(vit(), images, labels).loss


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        ({}, "stem.proj"),
        ({"stem_norm": "dual"}, "stem.proj"),
        ({"stem": "conv", "stem_layers": 1}, "stem.convs.0"),
        ({"readout": "class_attention", "position": "rope"}, "stem.proj"),
    ],
)
def test_the_gradient_of_the_patch_projection_is_that_of_autograd(options, layer):
    model, (images, labels) = vit(**options).eval(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    gradients = [p.grad.flatten() for p in model.get_submodule(layer).parameters()]
    expected = torch.cat(gradients)
    signal = fathoms.probe(model, images, labels, optimizer=optimizer)
    assert (signal.projection.layer, signal.projection.update) == (layer, None)
    assert signal.projection.weights == pytest.approx(expected.norm().item(), rel=1e-5)
    assert signal.projection.weights_rms == pytest.approx(expected.square().mean().sqrt().item(), rel=1e-5)
    middle = sorted(site.weights_rms for site in signal.main())[3:5]
    assert signal.projection_ratio == pytest.approx(signal.projection.weights_rms / (sum(middle) / 2))
    optimizer.step()
    after = fathoms.probe(model, images, labels, optimizer=optimizer)
    weights = torch.cat([p.detach().flatten() for p in model.get_submodule(layer).parameters()])
    assert after.projection.update == pytest.approx((0.1 * expected.norm() / weights.norm()).item(), rel=1e-5)
    assert json.loads(json.dumps(after.to_json()))["projection"]["layer"] == layer


def test_a_frozen_patch_projection_has_no_gradient_and_a_model_without_a_stem_none_to_measure():
    model, (images, labels) = vit(), batch()
    model.stem.requires_grad_(False)
    assert fathoms.probe(model, images, labels).projection.weights == 0.0

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = vit().blocks, torch.nn.Linear(32, 10)

        def forward(self, images):
            x = images.flatten(2).transpose(1, 2).expand(-1, -1, 32)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    alone = fathoms.probe(Blocks(), images, labels)
    assert (alone.projection, alone.projection_ratio) == (None, None)
    assert alone.to_json()["projection"] is None
