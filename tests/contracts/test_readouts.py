"""The contract of read-outs. A new one gets these tests by being registered."""

from __future__ import annotations

import pytest
import torch

from fathoms import FathomsError
from fathoms.parts import READOUTS
from fathoms.parts.protocols import Readout

PATCHES, REGISTERS = 9, 2


def build(name, queries=1):
    if name == "class_attention":
        options = {"heads": 4, "class_attention_depth": 2, "depth": 3, "residual": "layerscale"}
        return READOUTS.build(name, 32, queries=queries, **options)
    return READOUTS.build(name, 32, queries=queries)


def through(readout, patches):
    """The way of the tokens through a model whose blocks do nothing: registers, then the read-out's queries."""
    registers = torch.zeros(patches.shape[0], REGISTERS, 32, dtype=patches.dtype)
    return readout.start(torch.cat([registers, patches], dim=1))


@pytest.fixture(params=list(READOUTS))
def name(request):
    return request.param


@pytest.fixture
def readout(name):
    return build(name)


def test_is_a_readout(readout):
    assert isinstance(readout, Readout)


def test_no_two_names_build_the_same_class():
    assert len({type(build(name)) for name in READOUTS}) == len(READOUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gives_one_vector_a_query_in_the_dtype_of_the_tokens(readout, dtype):
    readout = readout.to(dtype)
    tokens = through(readout, torch.randn(2, PATCHES, 32, dtype=dtype))
    pooled = readout.pool(readout.finish(tokens, REGISTERS), REGISTERS)
    assert (pooled.shape, pooled.dtype) == ((2, 1, 32), dtype)


def test_puts_as_many_tokens_in_front_as_it_says(name, readout):
    tokens = through(readout, torch.randn(2, PATCHES, 32))
    assert tokens.shape == (2, readout.travelling + REGISTERS + PATCHES, 32)
    assert READOUTS.metadata(name).travels == (readout.travelling > 0)


def test_read_is_what_pool_looks_at(readout):
    """A model calls `read` alone where only the logits are asked for."""
    tokens = through(readout, torch.randn(2, PATCHES, 32))
    whole, part = readout.finish(tokens, REGISTERS), readout.read(tokens, REGISTERS)
    assert torch.allclose(readout.pool(whole, REGISTERS), readout.pool(part, REGISTERS), atol=1e-6)


def test_gives_a_gradient_to_every_parameter(readout):
    tokens = through(readout, torch.randn(2, PATCHES, 32, requires_grad=True))
    readout.pool(readout.read(tokens, REGISTERS), REGISTERS).square().sum().backward()
    for key, parameter in readout.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


def test_reads_patches_and_no_registers(readout):
    """Class tokens read them in the blocks before; here nothing of a register may come in."""
    patches = torch.randn(2, PATCHES, 32)
    tokens = through(readout, patches)
    other = tokens.clone()
    other[:, readout.travelling : readout.travelling + REGISTERS] = 7.0
    pooled = [readout.pool(readout.read(each, REGISTERS), REGISTERS) for each in (tokens, other)]
    assert torch.equal(*pooled)


def test_survives_save_and_load(name, readout):
    twin = build(name)
    twin.load_state_dict(readout.state_dict())
    patches = torch.randn(2, PATCHES, 32)
    vectors = [each.pool(each.read(through(each, patches), REGISTERS), REGISTERS) for each in (readout, twin)]
    assert torch.equal(*vectors)


def test_counts_multiplications(name, readout):
    """The class token is there already; the mean multiplies by 1/N; class attention grows with its context."""
    one, more = readout.flop_count(PATCHES), readout.flop_count(2 * PATCHES)
    if name == "cls":
        assert one == more == 0
    elif name in ("mean", "mean_cls"):
        assert one == more == 32
    elif name == "seqpool":
        assert (one, more) == (PATCHES * 65, 2 * PATCHES * 65)
    else:
        assert 0 < one < more < 2 * one + readout.flop_count(0)


def test_a_distillation_token_has_a_vector_of_its_own_or_is_refused(name):
    if not READOUTS.metadata(name).queries:
        with pytest.raises(FathomsError, match=f"readout '{name}' has no query tokens"):
            build(name, queries=2)
        return
    readout = build(name, queries=2)
    tokens = through(readout, torch.randn(2, PATCHES, 32))
    pooled = readout.pool(readout.read(tokens, REGISTERS), REGISTERS)
    assert pooled.shape == (2, 2, 32)
    assert not torch.allclose(pooled[:, 0], pooled[:, 1])


def test_mean_is_the_mean_of_the_patches():
    patches = torch.randn(2, PATCHES, 32)
    readout = build("mean")
    pooled = readout.pool(through(readout, patches), REGISTERS)
    assert torch.allclose(pooled[:, 0], patches.mean(dim=1), atol=1e-6)


def test_an_unknown_name_raises_with_the_nearest():
    with pytest.raises(FathomsError, match="no readout is called 'meen'; did you mean 'mean'"):
        READOUTS.build("meen", 32)
