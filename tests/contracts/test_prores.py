"""ProRes: the warm-up of each block, seen by copies, and gone when it is over."""

from __future__ import annotations

import pytest
import torch

import fathoms
from fathoms import ViT, ViTConfig
from fathoms.parts import ProgressiveResidual, set_progress
from fathoms.parts.residual_updates import Warmup
from fathoms.training.master_weights import ComputeCopy

TINY = {
    "image_size": 8,
    "patch_size": 4,
    "dim": 16,
    "heads": 2,
    "depth": 4,
    "num_classes": 3,
    "residual": "prores",
}
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def vit(**more):
    torch.manual_seed(0)
    return ViT(ViTConfig(**TINY | more))


def factors(model):
    return [block.mlp_join.scale.factor.item() for block in model.blocks]


def test_block_l_is_whole_at_l_over_depth_of_the_warmup():
    """min(t / (T l), 1): with 1000 updates and a warm-up of 400, T is 100 for the four blocks."""
    model = vit(residual_warmup=0.4)
    for update in (0, 50, 100, 250, 400, 999):
        set_progress(model, update / 1000)
        expected = [min(update / (100 * block), 1.0) for block in (1, 2, 3, 4)]
        assert factors(model) == pytest.approx(expected), update


def test_forward_and_gradient_are_those_of_the_formula():
    model = vit().double()
    set_progress(model, 0.1)
    images = IMAGES.double()
    x = model.embed(images)
    for index, block in enumerate(model.blocks):
        alpha = min(0.5 * 4 / (index + 1), 1.0)
        x = x + alpha * block.attn(block.attn_join.norm(x))
        x = x + alpha * block.mlp(block.mlp_join.norm(x))
    ours, theirs = model(images), model.head(model.norm(x)[:, 0])
    assert torch.allclose(ours, theirs, rtol=1e-6)
    weights = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), weights) for y in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-12)


def test_a_model_that_is_not_trained_and_one_after_its_warmup_are_the_plain_network():
    plain = vit(residual="none")
    model = vit()
    assert torch.equal(model(IMAGES), plain(IMAGES))
    set_progress(model, 0.05)
    assert not torch.allclose(model(IMAGES), plain(IMAGES))
    set_progress(model, 0.2)
    assert torch.equal(model(IMAGES), plain(IMAGES))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.flop_count() == plain.flop_count()


def test_the_working_copy_sees_the_factor_change():
    model = vit()
    copy = ComputeCopy(model, torch.float32).module
    before = copy(IMAGES)
    Warmup(model).set(0.0)
    assert factors(copy) == [0.0] * 4
    assert not torch.allclose(copy(IMAGES), before)


def test_nothing_is_set_once_all_are_one_until_the_run_is_rolled_back():
    model = vit()
    warmup = Warmup(model)
    warmup.set(0.5)
    assert warmup.done
    model.blocks[0].mlp_join.scale.factor.fill_(7.0)
    warmup.set(0.6)
    assert factors(model)[0] == 7.0
    warmup.set(0.01)
    assert factors(model) == pytest.approx([0.2, 0.1, 0.2 / 3, 0.05])


@pytest.mark.compile
def test_a_compiled_model_reads_the_factor_anew():
    model = vit(depth=1)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    before = compiled(IMAGES)
    set_progress(model, 0.02)
    assert not torch.allclose(compiled(IMAGES), before)
    assert torch.equal(compiled(IMAGES), model(IMAGES))


@pytest.mark.parametrize("progress", [0.05, 1.0])
def test_a_fold_takes_the_factor_away(progress):
    model = vit()
    set_progress(model, progress)
    folded, report = fathoms.fold(model, images=IMAGES)
    assert report.left == ()
    assert not any(isinstance(module, ProgressiveResidual) for module in folded.modules())
    assert {type(block.mlp_join.scale).__name__ for block in folded.blocks} == {"Unscaled"}


@pytest.mark.parametrize("progress", [float("nan"), -1.0, 2.0])
def test_progress_that_is_not_a_share_of_the_run_is_refused(progress):
    model = vit()
    before = factors(model)
    with pytest.raises(fathoms.FathomsError, match="is not a share of the run; give updates done over all"):
        set_progress(model, progress)
    assert factors(model) == before


def test_progress_of_a_model_without_prores_is_refused():
    with pytest.raises(fathoms.FathomsError, match="set_progress: Linear has no residual 'prores'"):
        set_progress(torch.nn.Linear(2, 2), 0.5)
