"""Stacked Muon takes torch's steps, in a number of launches that does not grow with the number of blocks."""

from __future__ import annotations

import multiprocessing
import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fathoms import ViT, ViTConfig, param_groups
from fathoms.training import muon
from fathoms.training.muon import MuonWithAdamW, orthogonalized
from fathoms.training.optimization import build_optimizer, set_lr
from fathoms.training.optimizer_step import step_unless

# Wide, tall, square and odd, and two of a shape in groups of different rates.
SHAPES = [(16, 40), (40, 16), (24, 24), (7, 13), (13, 7), (1, 9), (9, 1), (1, 1)] * 3

# Of the way that a matrix has gone. Libraries may sum a stack's products in another order than one matrix's, and
# bfloat16 makes up to 2e-2 of it (torch's own Muon on shards); where they sum alike it is 1e-6, the last bits of
# float32. The smallest mistake below makes 1e-1.
BOUND = 4e-2


def matrices(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def groups_of(params, cuts=(0, 5, 12)):
    """Groups that differ in rate and decay, as layer decay makes them."""
    ends = [*cuts[1:], len(params)]
    rows = enumerate(zip(cuts, ends, strict=True))
    return [{"params": params[a:b], "lr_scale": 0.5**i, "weight_decay": 0.1 * (1 + i)} for i, (a, b) in rows]


def give_gradients(params, step, missing=()):
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(params):
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index in missing else noise * 10.0 ** (step % 3 - 1)


def stacked(groups, **options):
    return MuonWithAdamW([{**group, "algorithm": "muon"} for group in groups], **options)


def torchs(groups, **options):
    return torch.optim.Muon(groups, **{"adjust_lr_fn": "match_rms_adamw"} | options)


def run(kind, steps=6, params=None, missing=None, **options):
    params = matrices() if params is None else params
    optimizer = kind(groups_of(params), **options)
    for step in range(steps):
        give_gradients(params, step, missing(step) if missing else ())
        set_lr(optimizer, 0.02 / (1 + step % 4))
        optimizer.step()
    return params, optimizer


def apart(ours, theirs, start=None):
    """The largest distance between two ends, as a share of the way there."""
    start = matrices() if start is None else start
    rows = [[p.detach().double() for p in row] for row in zip(ours, theirs, start, strict=True)]
    return max(float((a - b).norm() / (b - c).norm()) for a, b, c in rows)


def buffers(params, optimizer):
    return [optimizer.state[parameter]["momentum_buffer"] for parameter in params]


@pytest.mark.parametrize("momentum", [0.95, 0.4])
def test_steps_are_torchs(momentum):
    ours, optimizer = run(stacked, momentum=momentum)
    theirs, peer = run(torchs, momentum=momentum)
    assert apart(ours, theirs) < BOUND
    for a, b in zip(buffers(ours, optimizer), buffers(theirs, peer), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "mistake",
    [
        {"nesterov": False},
        {"ns_steps": 4},
        {"ns_coefficients": (3.3, -4.7750, 2.0315)},
        {"ns_coefficients": (3.4445, -4.9, 2.0315)},
        {"ns_coefficients": (3.4445, -4.7750, 1.9)},
        {"adjust_lr_fn": "original"},
    ],
    ids=str,
)
def test_the_bound_would_see_a_mistake(mistake):
    # Without those of one row or column, where every mistake is glaring.
    shapes = [shape for shape in SHAPES if min(shape) > 1]
    ours, _ = run(stacked, params=matrices(shapes))
    theirs, _ = run(torchs, params=matrices(shapes), **mistake)
    assert apart(ours, theirs, matrices(shapes)) > 2 * BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_parameters_of_other_widths_move_as_torchs(dtype):
    """A long step, so that the last bit of a bfloat16 is little of it."""
    ends = []
    for kind in (stacked, torchs):
        params = matrices(dtype=dtype)
        give_gradients(params, 0)
        kind([{"params": params, "weight_decay": 0.1}], lr=1.0).step()
        assert all(parameter.dtype == dtype for parameter in params)
        ends.append(params)
    assert apart(*ends, matrices(dtype=dtype)) < BOUND


def test_the_rate_is_not_rounded_to_bfloat16():
    (parameter,) = matrices([(8, 12)])
    start = parameter.detach().clone()
    give_gradients([parameter], 0)
    stacked([{"params": [parameter]}], lr=0.3, momentum=0.0).step()
    (update,) = orthogonalized(parameter.grad[None].bfloat16())
    # A bfloat16 would be wrong by 2e-3 of the way.
    step = 0.3 * 0.2 * 12**0.5 * update.float()
    assert torch.allclose(parameter, start - step, rtol=0, atol=1e-6)


def test_matrices_without_a_gradient_stay_as_torchs_do():
    def missing(step):
        return {0, 9, *range(step, len(SHAPES), 5)}

    ours, optimizer = run(stacked, missing=missing)
    theirs, _ = run(torchs, missing=missing)
    assert all(torch.equal(ours[index], matrices()[index]) for index in (0, 9))
    assert not any(ours[index] in optimizer.state for index in (0, 9))
    moved = [index for index in range(len(SHAPES)) if index not in (0, 9)]
    assert apart(*([group[i] for i in moved] for group in (ours, theirs, matrices()))) < BOUND


def test_without_any_gradient_nothing_moves_and_without_any_slope_only_decay_does():
    params = matrices()
    optimizer = stacked([{"params": params, "weight_decay": 0.1}], lr=0.5)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, matrices(), strict=True))
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.equal(a, b * 0.95) for a, b in zip(params, matrices(), strict=True))


def test_a_limit_on_stacks_changes_no_number(monkeypatch):
    whole, _ = run(stacked)
    monkeypatch.setattr(muon, "LIMIT", 2 * 16 * 40)
    with Ops() as ops:
        cut, _ = run(stacked)
    sizes = {size for name, size in ops.seen if name == "bmm"}
    # Three matrices each: two and one, where three were too many.
    assert {(2, 16, 16), (1, 16, 16), (2, 24, 24), (1, 24, 24), (3, 7, 7)} < sizes
    assert not {(3, 16, 16), (3, 24, 24)} & sizes
    assert apart(cut, whole) < BOUND


class Ops(TorchDispatchMode):
    """Notes each operation that makes or changes numbers, with the size of its result."""

    VIEWS = ("detach", "view", "unbind", "transpose", "alias")
    NOTES = ("empty", "promote_types", "lift_fresh", "_record_function_enter_new", "_record_function_exit")

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if name not in self.VIEWS + self.NOTES:
            self.seen.append((name, tuple(out.shape) if isinstance(out, torch.Tensor) else None))
        return out


def vit(depth=2):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "dim": 16, "heads": 2, "depth": depth, "num_classes": 5}
    return ViT(ViTConfig(**sizes))


def stepped(model, layer_decay=None):
    """The optimizer of the matrices inside blocks alone, after a first step."""
    groups = param_groups(model, 0.05, layer_decay=layer_decay)
    optimizer = build_optimizer(groups, "muon", lr=0.002)
    optimizer._adamw = None
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("held", ["may be held", "is not held"])
def test_launches_do_not_grow_with_blocks_or_groups(held):
    counts = []
    for depth, layer_decay in ((2, None), (7, None), (7, 0.7)):
        optimizer = stepped(vit(depth), layer_decay)
        with Ops() as ops:
            step_unless(optimizer, torch.tensor(0.0)) if held == "may be held" else optimizer.step()
        counts.append(Counter(name for name, _ in ops.seen))
    assert counts[0] == counts[1] == counts[2]
    # Four shapes: 15 products each, and what stands around them.
    assert counts[0]["bmm"] + counts[0]["baddbmm"] == 4 * 15
    assert counts[0].total() <= 4 * 34
    # Nothing that would wait for a device.
    assert not counts[0].keys() & {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}


def test_products_are_of_the_short_side():
    params = matrices([(8, 32), (32, 8)])
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    with Ops() as ops:
        stacked([{"params": params}]).step()
    assert {size for name, size in ops.seen if name == "bmm"} == {(1, 8, 8)}


def test_a_held_step_keeps_every_bit():
    params, optimizer = run(stacked, steps=2)
    with torch.no_grad():
        params[0][0, 0] = buffers(params, optimizer)[0][0, 0] = -0.0
    kept = [tensor.detach().clone() for tensor in [*params, *buffers(params, optimizer)]]
    give_gradients(params, 2)
    params[0].grad[0, 0] = float("nan")
    params[1].grad[0, 0] = float("inf")
    step_unless(optimizer, torch.tensor(1.0))
    for a, b in zip([*params, *buffers(params, optimizer)], kept, strict=True):
        assert torch.equal(a.detach().view(torch.int32), b.view(torch.int32))


def test_sharded_matrices_move_as_whole_ones_bit_for_bit(tmp_path):
    """FSDP2 in processes: shards of odd lengths, stacks that do not divide, and held steps."""
    ranks = 2
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "fathoms.training.optimization"])
    script = str(Path(__file__).with_name("muon_rank.py"))
    names = [{"rank": rank, "ranks": ranks, "folder": str(tmp_path)} for rank in range(ranks)]
    started = [context.Process(target=runpy.run_path, args=(script, given), daemon=True) for given in names]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=120)
    assert [process.exitcode for process in started] == [0] * ranks
    assert {path.name for path in tmp_path.glob("same-*")} == {f"same-{rank}" for rank in range(ranks)}
