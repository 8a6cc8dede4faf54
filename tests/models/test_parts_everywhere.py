"""The parts of 2025 and 2026 under everything that works on a model: swap, fold, copies, layers, compilation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fathoms
from fathoms import ViT, ViTConfig
from fathoms.parts.placements import PLACEMENTS
from fathoms.parts.residual_updates import Warmup
from fathoms.parts.residuals import RESIDUALS
from fathoms.surgery.norm_sites import norms
from fathoms.training.compiling import GraphedStep, compile_blocks
from fathoms.training.master_weights import ComputeCopy
from pretended_graphs import pretend_capture
from tiny_models import random_images
from tiny_parts import PARTS, SMALL

each_part = pytest.mark.parametrize("part", PARTS)


def make(part, depth=3, **more):
    """A model in training whose parameters are off their start, where ones and zeros would hide a mistake."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL | {"depth": depth} | PARTS.get(part, {}) | more))
    Warmup(model).set(0.05)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def numbers(model, module=None, device="cpu"):
    """Logits of a module and the gradients of a model's parameters, which it computes with."""
    images = random_images().to(device)
    logits = (model if module is None else module)(images)
    F.cross_entropy(logits.float(), torch.arange(8, device=device) % 5).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, expected, tolerance=1e-4):
    """Logits and gradients agree, the latter up to the rounding of the largest."""
    assert torch.allclose(got[0], expected[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == expected[1].keys()
    floor = tolerance * max(gradient.norm() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).norm() <= tolerance * gradient.norm() + floor, name


@each_part
def test_its_norms_can_be_swapped(part):
    model = make(part).eval()
    count = len(norms(model))
    report = fathoms.swap_norms(model, "learnable_scaler", calibrate=random_images())
    assert len(report) == count >= 2 * SMALL["depth"] + 1
    assert torch.isfinite(model(random_images())).all()


@each_part
@pytest.mark.parametrize("norm", ["layernorm", "learnable_scaler"])
def test_it_folds_to_the_same_function_or_says_why_something_is_left(part, norm):
    model = make(part, norm=norm).eval()
    folded, report = fathoms.fold(model)
    assert torch.allclose(folded(random_images()), model(random_images()), rtol=1e-4, atol=1e-5)
    left = [name for name, parameter in folded.named_parameters() if parameter.ndim == 1 and "norm" in name]
    reasons = dict(report.left)
    assert all(reason for reason in reasons.values())
    assert bool(left) <= bool(reasons), left


@each_part
def test_the_working_copy_computes_its_outputs_and_gradients(part):
    plain, copied = make(part), make(part)
    copies = ComputeCopy(copied, torch.float32)
    logits, _ = numbers(copied, copies.module)
    copies.pull_gradients()
    got = {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}
    assert_same((logits, got), numbers(plain))


@each_part
def test_in_bfloat16_the_working_copy_is_as_close_as_autocast(part):
    plain, copied = make(part), make(part)
    exact = plain(random_images())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = plain(random_images()).float()
        logits = ComputeCopy(copied).module(random_images()).float()
    assert (logits - exact).norm() <= 2 * (usual - exact).norm() + 0.01 * exact.norm()


@each_part
def test_layer_decay_covers_its_parameters_once_and_rises_with_the_blocks(part):
    model = make(part)
    scales = {}
    for group in fathoms.param_groups(model, 0.1, layer_decay=0.5):
        assert scales.keys().isdisjoint(group["names"])
        # Transfer over depth multiplies by its own factor, which is the same in every block.
        scales |= dict.fromkeys(group["names"], group["lr_scale"])
    assert scales.keys() == dict(model.named_parameters()).keys()
    for name, scale in scales.items():
        if name.startswith("blocks.1."):
            below, above = (scales.get(name.replace(".1.", f".{place}.", 1)) for place in (0, 2))
            assert below in (None, scale / 2)
            assert above == 2 * scale
    assert scales["head.weight"] == 1.0
    assert all(scale == 0.0625 for name, scale in scales.items() if name.startswith(("stem.", "position.")))


def products(model):
    """Multiplications in matrix products and convolutions, by torch's own counter, which counts additions too."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, 3, 16, 16))
    return counter.get_total_flops() // 2


# What a part multiplies outside of products beyond the plain model's 17 tokens of 24 channels in 3 blocks.
BLOCK = 17 * 24
# What the class token takes in a block: norms, GELU, scaling of q, and a row and a column of the softmax.
CLASS_TOKEN = 6 * 24 + 2 * 96 + 24 + 3 * (17**2 - 16**2)
EXTRA = {
    # And the head's input is divided by the ratio of the widths.
    "completep": 6 * BLOCK + 24,
    "depth_mup": 6 * BLOCK,
    "layernorm_scaling": 6 * BLOCK,
    # |x|², <x, f> and the multiple of x for each channel, and a division.
    "orthogonal": 6 * 17 * (3 * 24 + 1),
    # Beta for each element; for each image both means, alpha and beta of them.
    "mv_split": 6 * 24 * (17 + 4),
    "prores": 0,
    # All branches but the first have a second norm, of three multiplications, and a factor of the skip.
    "keel": 5 * 4 * BLOCK,
    "mix_ln": 0,
    "head_gate": 3 * BLOCK,
    "channel_gate": 3 * BLOCK,
    "conv_stem": 0,
    # No class token; 16 tokens are normed at the end instead of one, and the softmax over them divides.
    "seqpool": -3 * CLASS_TOKEN + 15 * 3 * 24 + 16,
    "late_class_token": -2 * CLASS_TOKEN,
}


@pytest.mark.parametrize("part", EXTRA)
def test_its_multiplications_are_counted(part):
    plain, model = make("plain").eval(), make(part).eval()
    beside = [each.flop_count() - products(each) for each in (model, plain)]
    assert beside[0] - beside[1] == EXTRA[part]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@each_part
def test_its_compiled_blocks_give_its_numbers(part):
    plain, compiled = make(part), make(part)
    compile_blocks(compiled, backend="aot_eager", dynamic=False, fullgraph=True)
    assert_same(numbers(compiled), numbers(plain))


def compilations(depth=12, **options):
    """How often the blocks of a model are compiled."""
    torch._dynamo.reset()
    model = ViT(ViTConfig(**SMALL | {"depth": depth} | options))
    counter = CompileCounter()
    compile_blocks(model, backend=counter, dynamic=False)
    model(random_images())
    return counter.frame_count


@pytest.mark.compile
@pytest.mark.parametrize("residual", RESIDUALS)
def test_blocks_of_a_residual_method_share_one_compilation(residual):
    placement = RESIDUALS.metadata(residual).placements[0]
    assert compilations(residual=residual, attn_placement=placement, mlp_placement=placement) == 1


@pytest.mark.compile
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_blocks_of_a_placement_share_one_compilation_but_for_keels_first(placement):
    count = compilations(attn_placement=placement, mlp_placement=placement)
    assert count == (2 if placement == "keel" else 1)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"drop_path": 0.2, "drop_path_schedule": "uniform"}, 1),
        # The first block drops nothing.
        ({"drop_path": 0.2, "drop_path_schedule": "linear"}, 2),
        ({"placement_by_depth": "0-3:post,4-7:pre_post"}, 3),
        ({"norm_by_depth": "0-3:dyt"}, 2),
        ({"class_token_block": 6}, 2),
        ({"residual": "mv_split", "class_token_block": 6}, 2),
        ({"attn_gate": "head", "position": "learned_rope"}, 1),
    ],
    ids=str,
)
def test_blocks_are_compiled_once_for_each_kind(options, count):
    assert compilations(**options) == count


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_of_several_parts_gives_their_numbers():
    """By inductor; one kind of block, since it compiles for ten seconds and more."""
    parts = {"residual": "mv_split", "attn_gate": "channel", "registers": 2}
    plain, compiled = (make("several", **parts) for _ in range(2))
    compile_blocks(compiled, backend="inductor", dynamic=False)
    assert_same(numbers(compiled), numbers(plain), 1e-3)


@pytest.mark.plain
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.compile,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@each_part
def test_replayed_graphs_of_its_compiled_working_copy_give_its_numbers(part, device, monkeypatch):
    """As `fathoms train` runs it: bfloat16 copy, compiled blocks, one graph; prores' factor changes between replays.

    On a CPU nothing is compiled and the graph is pretended: what the test builds is built there too.
    """
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(GraphedStep, "_capture", pretend_capture)
    model = make(part).to(device)
    copies = ComputeCopy(model)
    eager = copy.deepcopy(copies.module)
    if device == "cuda":
        compile_blocks(copies.module, dynamic=False)

    def compute(images):
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = copies.module(images)
        logits.float().square().mean().backward()
        return (logits.detach(),)

    step = GraphedStep(compute, [p for p in copies.module.parameters() if p.requires_grad])
    warmup = Warmup(model, eager)
    for progress in (0.05, 0.05, 0.05, 0.05, 0.05, 0.08, 0.2):
        warmup.set(progress)
        images = torch.randn(8, 3, 16, 16, device=device)
        (logits,) = step(images)
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            expected = eager(images)
        assert (logits.float() - expected.float()).norm() <= 0.03 * expected.float().norm()
    assert step.captures
