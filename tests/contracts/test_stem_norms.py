"""The contract of stem norms. A new one gets these tests by being registered."""

from __future__ import annotations

import pytest
import torch

from fathoms.errors import ConfigError, FathomsError, ShapeError
from fathoms.parts import STEM_NORMS, DualPatchNorm, PatchEmbed, patchify

PIXELS, DIM = 48, 32
PLACES = {
    "none": set(),
    "pre": {"ln0"},
    "post": {"ln1"},
    "dual": {"ln0", "ln1"},
    "post_pos": {"ln_pos"},
}


def stem_of(name):
    return PatchEmbed(DIM, patch_size=4, in_channels=3, stem_norm=name)


def tokens_of(stem, images):
    return stem.after_position(stem(images))


@pytest.fixture(params=list(STEM_NORMS))
def name(request):
    return request.param


def test_no_two_names_build_the_same_norms():
    """A registry that built "none" under every name would pass all other tests."""
    places = [tuple(norm is not None for norm in STEM_NORMS.build(name, PIXELS, DIM)) for name in STEM_NORMS]
    assert len(set(places)) == len(STEM_NORMS)


def test_each_norm_has_the_width_of_its_place(name):
    widths = (PIXELS, DIM, DIM)
    for norm, width in zip(STEM_NORMS.build(name, PIXELS, DIM), widths, strict=True):
        if norm is not None:
            x = torch.randn(2, 5, width, dtype=torch.bfloat16)
            assert (norm(x).shape, norm(x).dtype) == (x.shape, x.dtype)


def test_names_in_a_checkpoint_are_ln0_ln1_and_ln_pos(name):
    """Old checkpoints have them."""
    assert PLACES.keys() == set(STEM_NORMS), "a new stem norm says here which places it fills"
    found = {key.partition(".")[0] for key, _ in stem_of(name).named_parameters()}
    assert found == {"proj"} | PLACES[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_the_dtype_and_makes_a_token_a_patch(name, dtype):
    tokens = tokens_of(stem_of(name).to(dtype), torch.randn(2, 3, 8, 12, dtype=dtype))
    assert (tokens.shape, tokens.dtype) == ((2, 6, DIM), dtype)


def test_gives_a_gradient_to_every_parameter(name):
    stem = stem_of(name)
    (tokens_of(stem, torch.randn(2, 3, 8, 8)) * torch.randn(2, 4, DIM)).sum().backward()
    for key, parameter in stem.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key


def test_no_two_names_make_the_same_tokens():
    images, outputs = torch.randn(2, 3, 8, 8), []
    for name in STEM_NORMS:
        torch.manual_seed(0)
        stem = stem_of(name)
        # Positions stand between the last two places.
        outputs.append(stem.after_position(stem(images) + torch.linspace(0, 1, DIM)))
    for index, first in enumerate(outputs):
        assert not any(torch.allclose(first, second) for second in outputs[index + 1 :])


def test_survives_save_and_load(name):
    stem, twin, images = stem_of(name), stem_of(name), torch.randn(2, 3, 8, 8)
    twin.load_state_dict(stem.state_dict())
    assert torch.equal(tokens_of(stem, images), tokens_of(twin, images))


def test_counts_the_multiplications_of_its_norms(name):
    norms = [norm for norm in STEM_NORMS.build(name, PIXELS, DIM) if norm is not None]
    assert stem_of(name).flop_count(5) == 5 * PIXELS * DIM + sum(norm.flop_count(5) for norm in norms)


def test_dual_patch_norm_is_the_stem_with_both_norms():
    torch.manual_seed(0)
    dual = DualPatchNorm(DIM, 4, 3)
    torch.manual_seed(0)
    stem, images = stem_of("dual"), torch.randn(2, 3, 8, 8)
    assert torch.equal(dual(images), stem(images))


def test_patches_and_images_may_be_other_than_square():
    part = DualPatchNorm(24, patch_size=(4, 8), in_channels=2)
    images = torch.randn(2, 2, 12, 40)
    rows = [images[:, :, 4 * i : 4 * i + 4, 8 * j : 8 * j + 8] for i in range(3) for j in range(5)]
    by_hand = torch.stack([row.permute(0, 2, 3, 1).flatten(1) for row in rows], dim=1)
    assert torch.equal(patchify(images, (4, 8)), by_hand)
    assert part.ln0.weight.shape == (4 * 8 * 2,)
    assert part(images).shape == (2, 15, 24)
    with pytest.raises(ShapeError, match=r"images of 12x36 cannot be cut into patches of \(4, 8\)"):
        part(images[..., :36])
    with pytest.raises(ConfigError, match=r"patch_size=\(4, 0\) is too small"):
        DualPatchNorm(24, patch_size=(4, 0))


def test_an_unknown_name_raises_with_the_nearest():
    with pytest.raises(FathomsError, match="no stem_norm is called 'duel'; did you mean 'dual'"):
        stem_of("duel")


def test_tokens_are_as_large_at_any_patch_size_with_the_start_of_timm():
    """Its convolution keeps torch's start: weights and bias have a deviation of 1 / sqrt(3 inputs)."""
    torch.manual_seed(0)
    for patch_size in (2, 4, 16):
        patches = torch.randn(64, 3, 2 * patch_size, 2 * patch_size)
        theirs = torch.nn.Conv2d(3, 256, patch_size, patch_size)(patches).std().item()
        ours = PatchEmbed(256, patch_size)(patches).std().item()
        plain = PatchEmbed(256, patch_size, stem_init="trunc_normal")(patches).std().item()
        assert ours == pytest.approx((1 / 3 + 1 / (9 * patch_size**2)) ** 0.5, rel=0.05)
        assert ours == pytest.approx(theirs, rel=0.1 if patch_size > 2 else 0.2)
        assert plain == pytest.approx(0.02 * (3 * patch_size**2) ** 0.5, rel=0.05)


def test_an_unknown_start_is_refused_with_the_nearest():
    with pytest.raises(FathomsError, match="stem_init: no start is called 'fan_out'; did you mean 'fan_in'"):
        PatchEmbed(8, 4, stem_init="fan_out")
