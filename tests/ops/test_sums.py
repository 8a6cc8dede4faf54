"""Additions that compiled products take in: which, and that the numbers stay."""

from __future__ import annotations

import copy

import pytest
import torch

from fathoms.errors import ConfigError, UnknownNameError
from fathoms.models.config import ViTConfig
from fathoms.models.vit import ViT
from fathoms.surgery.fold.fold import fold
from fathoms.train.precision.master_weights import WorkingCopy
from fathoms.train.precision.policy import compile_options, sums_for

pytestmark = pytest.mark.compile

SUMS = {"fathoms.add_product.default": 4, "fathoms.gelu_mlp.default": 6}
SMALL = {"image_size": 32, "patch_size": 16, "dim": 64, "heads": 2, "depth": 2}


@pytest.fixture
def counts(monkeypatch):
    """How many sums each compiled graph was given, with cuBLAS taken to be here and no size too small."""
    from fathoms.ops import sums

    monkeypatch.setattr(sums, "MIN_TOKENS", 1)
    monkeypatch.setattr(sums, "why_not_cublas", lambda *_: None)
    return count_sums(monkeypatch)


def count_sums(monkeypatch):
    """A list that each compiled graph will write into."""
    from fathoms.ops import sums

    found = []

    class Counting(sums.FuseSums):
        def __call__(self, graph):
            super().__call__(graph)
            graph.lint()
            # The MLP has its sixth argument where it adds to something.
            found.append(sum(SUMS.get(str(node.target)) == len(node.args) for node in graph.nodes))

        def uuid(self):
            return None

    monkeypatch.setattr(sums, "FUSE_SUMS", Counting())
    torch.compiler.reset()
    return found


def block_of(device="cpu", **config):
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL, **config)).to(device).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return WorkingCopy(model).module.blocks[-1]


def outcome(block, x):
    x = x.detach().requires_grad_()
    y = block(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).sin().reshape(y.shape).to(y.dtype))
    found = [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]
    block.zero_grad()
    return [part.double() for part in found]


@pytest.mark.parametrize(
    ("config", "forward", "backward"),
    [
        ({"norm": "learnable_scaler"}, 2, 2),
        ({"norm": "none", "residual": "rezero"}, 2, 2),
        # A norm reads the sum in the pass that adds; only the last sum leaves the graph as it is.
        ({"norm": "layernorm"}, 1, 0),
        ({"norm": "layernorm", "residual": "layerscale"}, 1, 0),
        # A branch that may be dropped is multiplied, and so is the gradient in the middle.
        ({"norm": "learnable_scaler", "drop_path": 0.1}, 0, 1),
        ({"norm": "layernorm", "attn_placement": "post", "mlp_placement": "post"}, 0, 1),
    ],
)
def test_which_sums_are_taken_in(counts, config, forward, backward):
    block = block_of(**config)
    block.compile(**compile_options())
    outcome(block, torch.randn(3, 5, 64).bfloat16())
    assert counts == [forward, backward]


@pytest.mark.parametrize("norm", ["learnable_scaler", "layernorm"])
def test_numbers_stay(counts, norm):
    errors_stay(block_of(norm=norm), torch.randn(3, 5, 64).bfloat16())
    assert sum(counts) > 0


def errors_stay(block, x):
    """Hold that the block errs no more with its sums taken in than without."""
    fused, separate, wide = copy.deepcopy(block), copy.deepcopy(block), copy.deepcopy(block).double()
    fused.compile(**compile_options())
    separate.compile(**compile_options(sums="separate"))
    exact, found, other = outcome(wide, x.double()), outcome(fused, x), outcome(separate, x)
    for truth, one, two in zip(exact, found, other, strict=True):
        assert (one - truth).norm() <= 1.2 * (two - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.parametrize("readout", ["cls", "mean"])
def test_a_whole_model_has_all_but_the_last_sum_taken_in(counts, readout):
    """That one is read by the read-out, and in the backward pass the stem's gradient is made of it."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL | {"depth": 3}, norm="learnable_scaler", readout=readout)).train()
    compiled = torch.compile(WorkingCopy(model).module, **compile_options())
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(2, 3, 32, 32)).float().square().sum().backward()
    assert counts == [5, 5]


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        (lambda x, w, _v: x + x @ w, 1),
        # A bias that is spread over the channels is none that cuBLAS could add.
        (lambda x, w, v: x + torch.nn.functional.linear(x, w, v[:1]), 0),
        (lambda x, w, v: x + torch.nn.functional.linear(x, w, v), 1),
        (lambda x, w, v: x @ w + v, 0),
        (lambda x, w, _v: (x @ w).add(x, alpha=2), 0),
        (lambda x, w, _v: x.mT.contiguous().mT + x @ w, 0),
        (lambda x, w, _v: torch.sum(x + x @ w, dim=None), 0),
        (lambda x, w, _v: (x + x @ w).sum((0, 1)), 1),
        (lambda x, w, _v: (x + x @ w).sum(-1), 0),
        (lambda x, w, _v: (x + x @ w).mT.sum(1), 0),
        (lambda x, w, _v: (x + x @ w).relu(), 0),
        (lambda x, w, _v: x.double() + x @ w, 0),
        (lambda x, w, _v: (x @ w) * 2 + x, 0),
        # What all images or all tokens share has fewer rows than the sum.
        (lambda x, w, _v: x + x[0] @ w, 0),
        (lambda x, w, _v: x + x.mean(1, keepdim=True) @ w, 0),
        (lambda _x, _w, v: v.sum() + (v @ v), 0),
    ],
)
def test_it_takes_what_it_can_make(counts, form, taken):
    x, w, v = (torch.randn(shape).bfloat16() for shape in ((2, 5, 8), (8, 8), (8,)))
    found, plain = torch.compile(form, **compile_options())(x, w, v), form(x, w, v)
    # Where they round differs, and so may the last digit of a bfloat16 that much has cancelled in.
    assert (found - plain).float().norm() <= 0.02 * plain.float().norm()
    assert found.dtype == plain.dtype
    assert counts == [taken]


def test_sizes_that_are_left_open_are_left_alone(counts):
    x, w = torch.randn(2, 5, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    summed = torch.compile(lambda x, w: x + x @ w, **compile_options() | {"dynamic": None})
    torch.testing.assert_close(summed(x, w), x + x @ w)
    added = torch.compile(lambda x, w: x @ w + x.shape[0], **compile_options() | {"dynamic": None})
    torch.testing.assert_close(added(x, w), x @ w + 2)
    assert counts == [0, 0]


def test_equal_models_share_one_graph(counts):
    for seed in range(2):
        torch.manual_seed(seed)
        block = block_of(norm="learnable_scaler")
        block.compile(**compile_options())
        outcome(block, torch.randn(3, 5, 64).bfloat16())
    assert counts == [2, 2]


def test_a_small_batch_is_left_to_torch(counts, monkeypatch):
    from fathoms.ops import sums

    monkeypatch.setattr(sums, "MIN_TOKENS", 16)
    block = block_of(norm="learnable_scaler")
    block.compile(**compile_options())
    outcome(block, torch.randn(3, 5, 64).bfloat16())
    assert counts == [0, 0]


def test_sums_are_fused_where_steps_are_replayed():
    assert [sums_for(launch) for launch in ("graph", "eager", None)] == ["fused", "separate", "separate"]
    assert sums_for("graph", "aot_eager") == "separate"


def test_other_compilers_know_nothing_of_it():
    assert "options" not in compile_options("aot_eager")
    assert "options" not in compile_options(sums="separate")
    with pytest.raises(ConfigError, match="sums 'fused' is made by inductor, not by 'aot_eager'"):
        compile_options("aot_eager", "fused")
    with pytest.raises(UnknownNameError, match=r"sums: no form is called 'fuse'; did you mean 'fused'\?"):
        compile_options(sums="fuse")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("norm", "sums"), [("learnable_scaler", [2, 2]), ("layernorm", [1, 0])])
def test_on_a_device_numbers_stay(monkeypatch, norm, sums):
    counts = count_sums(monkeypatch)
    errors_stay(block_of("cuda", norm=norm), torch.randn(2**12, 5, 64, device="cuda").bfloat16())
    assert counts == sums


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_a_folded_block_answers_with_two_sums_and_no_addition(monkeypatch):
    """The MLP's kernel makes one of them."""
    counts = count_sums(monkeypatch)
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL, norm="learnable_scaler", norm_init="normal")).eval()
    block = fold(model)[0].to("cuda", torch.bfloat16).blocks[0]
    x = torch.randn(2**12, 5, 64, device="cuda").bfloat16()
    with torch.no_grad():
        exact = copy.deepcopy(block).double()(x.double())
        plain = block(x)
        block.compile(**compile_options())
        fused = block(x)
    assert counts == [2]
    assert (fused - exact).norm() <= 1.2 * (plain - exact).norm()
