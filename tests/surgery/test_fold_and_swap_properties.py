"""Fold and swap keep the function of any chain of affine parts and linears, in any order."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fathoms import FathomsError, norms
from fathoms.parts import Derf, DyT, LayerNorm, LayerScale, LearnableScaler, ReZero, RMSNorm
from fathoms.surgery.fold import fold
from fathoms.surgery.fold_graph import find_parts, trace
from fathoms.surgery.inputs import difference, run
from fathoms.surgery.swap import swap_norms

WIDTH = 6

PARTS = {
    "layernorm": lambda: LayerNorm(WIDTH),
    "torch_layernorm": lambda: nn.LayerNorm(WIDTH),
    "rmsnorm": lambda: RMSNorm(WIDTH),
    "scaler": lambda: LearnableScaler(WIDTH),
    "dyt": lambda: DyT(WIDTH),
    "derf": lambda: Derf(WIDTH),
    "layerscale": lambda: LayerScale(WIDTH, 0.5),
    "rezero": lambda: ReZero(WIDTH, 0.7),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no_bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "gelu": nn.GELU,
}


class Residual(nn.Module):
    """x + branch(x)."""

    def __init__(self, *parts):
        super().__init__()
        self.branch = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.branch(x)


names = st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5)
networks = st.tuples(st.integers(0, 2**16), st.lists(st.tuples(st.booleans(), names), min_size=1, max_size=3))


def build(plan):
    """Residual branches and chains of random parts, with random numbers in them, and one scale at least."""
    seed, chains = plan
    torch.manual_seed(seed)
    blocks = []
    for residual, chain in chains:
        parts = [PARTS[name]() for name in chain]
        blocks.append(Residual(*parts) if residual else nn.Sequential(*parts))
    model = nn.Sequential(*blocks, LearnableScaler(WIDTH), nn.Linear(WIDTH, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.eval()


def tokens():
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def same(a, b, tolerance=1e-9):
    return difference(run(a, tokens()), run(b, tokens())) < tolerance


@settings(max_examples=20, deadline=None)
@given(networks)
def test_fold_keeps_the_function_and_folding_again_changes_nothing(plan):
    model = build(plan)
    folded, report = fold(model, images=tokens())
    assert report.difference < 1e-10
    assert same(model, folded)
    again, second = fold(folded, images=tokens())
    assert len(second) == 0
    assert difference(run(folded, tokens()), run(again, tokens())) == 0.0
    assert sum(p.numel() for p in folded.parameters()) == report.parameters[1]


@settings(max_examples=12, deadline=None)
@given(networks, st.sampled_from(["learnable_scaler", "dyt", "rmsnorm"]))
def test_swap_then_fold_is_fold_of_the_swapped(plan, to):
    model = build(plan)
    if any(site.kind != to for site in norms(model)):
        swap_norms(model, to)
    folded, _ = fold(model, images=tokens())
    assert same(model, folded)


steps = st.lists(
    st.sampled_from(["fold", "learnable_scaler", "dyt", "rmsnorm", "layernorm"]), min_size=2, max_size=4
)


@settings(max_examples=15, deadline=None)
@given(networks, steps)
def test_in_any_order_a_fold_keeps_the_function_and_a_swap_keeps_the_matrices(plan, order):
    model, folded_before = build(plan), False
    for step in order:
        if step == "fold":
            if not folded_before and not find_parts(trace(model, tokens())):
                return
            folded, report = fold(model, images=tokens())
            assert same(model, folded)
            assert not (folded_before and order.count("fold") == len(order)) or len(report) == 0
            model, folded_before = folded, True
            continue
        linears = [m.weight.clone() for m in model.modules() if isinstance(m, nn.Linear)]
        if any(site.kind != step for site in norms(model)):
            swap_norms(model, step)
            assert {site.kind for site in norms(model)} == {step}
        else:
            with pytest.raises(FathomsError, match="nothing to swap|no norm left"):
                swap_norms(model, step)
        after = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        assert all(torch.equal(a, b) for a, b in zip(linears, after, strict=True))


@settings(max_examples=12, deadline=None)
@given(networks)
def test_fold_then_swap_never_touches_what_is_folded_into_the_linears(plan):
    model = build(plan)
    folded, _ = fold(model, images=tokens())
    sites = [site for site in norms(folded) if site.kind != "layernorm"]
    linears = [m.weight.clone() for m in folded.modules() if isinstance(m, nn.Linear)]
    if sites:
        swap_norms(folded, "layernorm")
    else:
        with pytest.raises(FathomsError):
            swap_norms(folded, "layernorm")
    after = [m.weight for m in folded.modules() if isinstance(m, nn.Linear)]
    assert all(torch.equal(a, b) for a, b in zip(linears, after, strict=True))


@settings(max_examples=12, deadline=None)
@given(networks)
def test_a_folded_network_survives_state_dict_deepcopy_and_bfloat16(plan):
    model = build(plan)
    folded, _ = fold(model, images=tokens())
    twin = copy.deepcopy(folded)
    state = {name: value.clone() for name, value in folded.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(state)
    assert difference(run(folded, tokens()), run(twin, tokens())) == 0.0
    small, plain = copy.deepcopy(folded).bfloat16(), copy.deepcopy(model).bfloat16()
    assert small(tokens().bfloat16()).dtype == torch.bfloat16
    # Both round to eight bits, each in its own places: neither may be far worse than the other.
    exact, half = run(model, tokens()), tokens().bfloat16()
    assert difference(exact, run(small, half)) <= 10 * difference(exact, run(plain, half)) + 0.05


@settings(max_examples=12, deadline=None)
@given(networks)
def test_swapping_with_kept_scales_there_and_back_is_the_identity(plan):
    model = build(plan)
    kinds = {site.name: site.kind for site in norms(model)}
    twin = copy.deepcopy(model)
    plain = [name for name, kind in kinds.items() if kind == "layernorm"]
    if not plain:
        return
    eps = {name: twin.get_submodule(name).eps for name in plain}
    swap_norms(twin, "learnable_scaler", only=plain)
    swap_norms(twin, "layernorm", only=plain)
    for name in plain:
        twin.get_submodule(name).eps = eps[name]
    assert difference(run(model, tokens()), run(twin, tokens())) == 0.0
