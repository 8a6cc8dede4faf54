"""The contract of position embeddings. A new one gets these tests by being registered."""

from __future__ import annotations

import pytest
import torch

from fathoms import FathomsError
from fathoms.parts import POSITIONS
from fathoms.parts.protocols import Position
from fathoms.parts.rope import rotate

GRID = 3
ROTARY = [name for name in POSITIONS if POSITIONS.metadata(name).rotary]


def build(name, dim=32, grid=GRID, heads=4, **tokens):
    heads_and_tokens = {"heads": heads, **tokens} if POSITIONS.metadata(name).rotary else {}
    return POSITIONS.build(name, dim, grid, **heads_and_tokens)


@pytest.fixture(params=list(POSITIONS))
def name(request):
    return request.param


def test_is_a_position(name):
    assert isinstance(build(name), Position)


def test_no_two_names_build_the_same_class():
    assert len({type(build(name)) for name in POSITIONS}) == len(POSITIONS)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_shape_and_dtype_whatever_the_weights_are(name, dtype, weights):
    tokens = torch.randn(2, GRID**2, 32, dtype=dtype)
    out = build(name).to(weights)(tokens)
    assert (out.shape, out.dtype) == (tokens.shape, dtype)


def test_gives_a_gradient_to_the_tokens_and_every_parameter(name):
    position, tokens = build(name), torch.randn(2, GRID**2, 32, requires_grad=True)
    (position(tokens) * torch.randn(2, GRID**2, 32)).sum().backward()
    for tensor in (tokens, *position.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.any()


def test_its_traits_say_what_it_does(name):
    """`adds` and `rotary` are what ViTConfig decides by."""
    traits, position, tokens = POSITIONS.metadata(name), build(name), torch.randn(2, GRID**2, 32)
    assert traits.adds == (not torch.equal(position(tokens), tokens))
    assert traits.rotary == (position.rope is not None)


def test_tells_every_patch_from_every_other_unless_it_is_none(name):
    """By what it adds or by the rotation; neither is the same for two patches."""
    position = build(name)
    marks = [position(torch.zeros(1, GRID**2, 32))[0]]
    if position.rope is not None:
        marks += [position.rope().cos, position.rope().sin]
    rows = {tuple(row) for row in torch.cat(marks, dim=-1).tolist()}
    assert len(rows) == (1 if name == "none" else GRID**2)


def test_follows_another_grid_with_parameters_of_the_same_shape(name):
    position = build(name)
    shapes = [parameter.shape for parameter in position.parameters()]
    position.set_grid(GRID + 2)
    tokens = torch.randn(2, (GRID + 2) ** 2, 32)
    assert position(tokens).shape == tokens.shape
    assert position.rope is None or position.rope().cos.shape[0] == (GRID + 2) ** 2
    assert [parameter.shape for parameter in position.parameters()] == shapes


def test_only_parameters_are_saved(name):
    """Tables that follow from the sizes are not part of a checkpoint."""
    position = build(name)
    assert list(position.state_dict()) == [key for key, _ in position.named_parameters()]


def test_can_be_filled_after_a_meta_build(name):
    with torch.device("meta"):
        position = build(name)
    position.to_empty(device="cpu")
    for module in position.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    tensors = [*position.parameters(), *position.buffers()]
    assert all(tensor.isfinite().all() and tensor.abs().max() <= 1 for tensor in tensors)


def test_leaves_no_memory_unfilled_when_it_is_built_or_resized(name):
    torch.use_deterministic_algorithms(True)  # Fills new memory with NaN.
    try:
        position = build(name)
        built = [tensor.clone() for tensor in (*position.parameters(), *position.buffers())]
        position.set_grid(GRID + 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(tensor.isfinite().all() for tensor in [*built, *position.parameters(), *position.buffers()])


def test_sincos_is_the_formula_of_moco_v3_and_mae():
    """Half of the channels follow the column, the others the row: first all sines, then all cosines."""
    table = build("sincos", dim=8)(torch.zeros(1, GRID**2, 8))[0]
    for cell in range(GRID**2):
        row, column = divmod(cell, GRID)
        angles = [torch.tensor([place, place / 1e4**0.5]) for place in (column, row)]
        expected = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)])
        assert torch.allclose(table[cell], expected, atol=1e-6)


def test_counts_the_rotations_of_each_block(name):
    """Two multiplications for each channel of q and of k; an addition multiplies nothing."""
    expected = 5 * 2 * 2 * GRID**2 * 32 if name in ROTARY else 0
    assert build(name).flop_count(5) == expected


@pytest.mark.parametrize("name", ROTARY)
def test_rotates_registers_and_leaves_queries_alone(name):
    rotation = build(name, queries=1, registers=4).rope()
    assert rotation.cos.shape == (1 + 4 + GRID**2, 8)
    assert rotation.cos[0].eq(1).all()
    assert not rotation.sin[0].any()
    assert rotation.sin[2:5].any(dim=-1).all()


@pytest.mark.parametrize("name", ROTARY)
def test_rotates_as_eva02_does(name):
    """Rows in the first half of a head's channels, columns in the second; neighbours are a pair. timm has EVA-02."""
    timm = pytest.importorskip("timm.layers")
    q = torch.randn(2, 4, GRID**2, 16)
    table = timm.RotaryEmbeddingCat(16, in_pixels=False, feat_shape=[GRID, GRID]).get_embed()
    expected = timm.apply_rot_embed_cat(q, table)
    assert torch.allclose(rotate(q, build(name, dim=64).rope()), expected, atol=1e-6)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_refuses_heads_and_registers_that_cannot_be(name):
    with pytest.raises(FathomsError, match="^dim=32 is not divisible by heads=5"):
        build(name, heads=5)
    with pytest.raises(FathomsError, match="divisible by 4, not 2; change dim or heads"):
        build(name, heads=16)
    with pytest.raises(FathomsError, match="registers=3 is not a square"):
        build(name, registers=3)


def test_an_unknown_name_raises_with_the_nearest():
    with pytest.raises(FathomsError, match="no position is called 'sincoz'; did you mean 'sincos'"):
        POSITIONS.build("sincoz", 32, GRID)
