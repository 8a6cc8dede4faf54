"""Optimizers take the steps of timm's and torch's, and resume exactly from a saved state."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fathoms import FathomsError, ViT, ViTConfig, param_groups
from fathoms.models.param_groups import ParamGroups
from fathoms.training.checkpoint_load import load_optimizer_state
from fathoms.training.checkpoint_save import optimizer_state
from fathoms.training.optimization import OPTIMIZERS, build_optimizer, set_lr
from fathoms.training.optimizer_step import Lamb

SHAPES = {"matrix": (5, 7), "wide": (3, 4, 2), "bias": (6,), "scale": (1,), "zero": (4, 4), "silent": (3, 3)}


def problem(seed=0):
    """Parameters of all kinds: "zero" starts at zero, "silent" never has a gradient but zero."""
    generator = torch.Generator().manual_seed(seed)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    with torch.no_grad():
        params["zero"].zero_()
    return params


def groups_of(params, weight_decay=0.02):
    """One group with decay at full rate, one with decay at a tenth, one without."""
    rows = [(["matrix", "zero"], weight_decay, 1.0), (["wide", "silent"], weight_decay, 0.1)]
    rows.append((["bias", "scale"], 0.0, 1.0))
    return ParamGroups(
        {
            "params": [params[name] for name in names],
            "names": names,
            "weight_decay": decay,
            "lr_scale": scale,
            "why": "",
        }
        for names, decay, scale in rows
    )


def give_gradients(params, step):
    """Gradients of changing size: some steps are clipped by LAMB and some are not."""
    generator = torch.Generator().manual_seed(100 + step)
    size = 0.01 if step % 3 else 3.0
    for name, parameter in params.items():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = size * (noise + 0.1 * parameter.detach())
        if name == "silent" or step % 7 == 6:
            parameter.grad.zero_()


def run(build, steps=50, start=0, params=None, optimizer=None):
    params = params or problem()
    optimizer = optimizer or build(groups_of(params))
    for step in range(start, steps):
        give_gradients(params, step)
        set_lr(optimizer, 0.01 * (1 + step % 4))
        optimizer.step()
    return params, optimizer


class PlainLamb(torch.optim.Optimizer):
    """LAMB tensor by tensor, in the order of operations of timm up to 1.0.30."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), max_grad_norm=1.0, always_adapt=False):
        super().__init__(params, {"lr": lr, "weight_decay": 0.01, "calls": 0})
        self.betas, self.max_grad_norm, self.always_adapt = betas, max_grad_norm, always_adapt

    @torch.no_grad()
    def step(self):
        first, second = self.betas
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_grad_norm is not None:
            whole = torch.stack([p.grad.norm() for p in given]).norm()
            for p in given:
                p.grad.div_((whole / self.max_grad_norm).clamp(min=1.0))
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p] = {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                mean, square = self.state[p]["mean"], self.state[p]["square"]
                mean.mul_(first).add_(p.grad, alpha=1 - first)
                square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                spread = (square.sqrt() / (1 - second ** group["calls"]) ** 0.5).add_(1e-6)
                update = (mean / (1 - first ** group["calls"])).div_(spread)
                if group["weight_decay"]:
                    update.add_(p, alpha=group["weight_decay"])
                if group["weight_decay"] or self.always_adapt:
                    weight, length = p.norm(), update.norm()
                    update.mul_(weight / length if weight > 0 and length > 0 else 1.0)
                p.add_(update, alpha=-group["lr"])


def timms_lamb():
    return pytest.importorskip("timm.optim").Lamb


def ends_where(peer, ours, options):
    """Assert that fifty steps of ours end where the peer's do: bit for bit, or close to timm's.

    timm folds the bias correction into other factors since 1.0.31, which rounds differently at every step.
    """
    theirs, _ = run(lambda groups: peer([dict(group) for group in groups], **options))
    for key, parameter in ours.items():
        if peer in (PlainLamb, torch.optim.AdamW):
            assert torch.equal(parameter, theirs[key]), key
        else:
            torch.testing.assert_close(parameter, theirs[key], rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("name", "peer"),
    [("lamb", lambda: PlainLamb), ("lamb", timms_lamb), ("adamw", lambda: torch.optim.AdamW)],
    ids=["lamb", "timms-lamb", "adamw"],
)
def test_fifty_steps_are_the_peers(name, peer):
    ours, _ = run(lambda groups: build_optimizer(groups, name, lr=0.01))
    ends_where(peer(), ours, {"lr": 0.01})


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_descent_is_timms_bit_for_bit(name):
    create = pytest.importorskip("timm.optim").create_optimizer_v2

    def peer(groups):
        plain = [{key: group[key] for key in ("params", "weight_decay", "lr_scale")} for group in groups]
        return create(plain, opt=name, lr=0.01, momentum=0.9)

    ours, _ = run(lambda groups: build_optimizer(groups, name, lr=0.01))
    theirs, _ = run(peer)
    for key, parameter in ours.items():
        assert torch.equal(parameter, theirs[key]), key


@pytest.mark.parametrize("peer", [lambda: PlainLamb, timms_lamb], ids=["plain", "timm"])
@pytest.mark.parametrize("options", [{"always_adapt": True}, {"max_grad_norm": None}, {"betas": (0.8, 0.9)}])
def test_lambs_options_are_timms(options, peer):
    ours, _ = run(lambda groups: Lamb([dict(group) for group in groups], **options))
    ends_where(peer(), ours, options)


def test_lamb_passes_over_parameters_without_a_gradient():
    results = []
    for build in (Lamb, PlainLamb):
        params = problem()
        optimizer = build([dict(group) for group in groups_of(params)], lr=0.01)
        for step in range(6):
            give_gradients(params, step)
            params["wide"].grad = params["bias"].grad = None
            params["matrix"].grad = params["matrix"].grad if step % 2 else None
            optimizer.step()
        results.append(params)
    for key, parameter in results[0].items():
        assert torch.equal(parameter, results[1][key]), key
    assert torch.equal(results[0]["wide"], problem()["wide"])


def test_lamb_without_any_gradient_moves_nothing():
    params = problem()
    Lamb(params.values()).step()
    assert all(torch.equal(parameter, problem()[name]) for name, parameter in params.items())


def vit(**options):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "dim": 16, "heads": 2, "depth": 2, "num_classes": 5}
    return ViT(ViTConfig(**sizes | options))


def train(model, optimizer, steps, start=0):
    for step in range(start, steps):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(images).square().sum().backward()
        set_lr(optimizer, 0.002 / (1 + step))
        optimizer.step()


@pytest.fixture(params=list(OPTIMIZERS))
def name(request):
    return request.param


def build(model, name, **options):
    return build_optimizer(param_groups(model, 0.05, layer_decay=0.7), name, lr=0.002, **options)


def test_every_group_keeps_its_names_and_scale(name):
    model = vit()
    optimizer = build(model, name)
    by_name = dict(model.named_parameters())
    names = [name for group in optimizer.param_groups for name in group["names"]]
    assert sorted(names) == sorted(by_name)
    for group in optimizer.param_groups:
        assert group["lr"] == 0.002 * group["lr_scale"]
        for own, parameter in zip(group["names"], group["params"], strict=True):
            assert parameter is by_name[own]
    set_lr(optimizer, 1.0)
    assert {group["lr"] for group in optimizer.param_groups} == {1.0, 0.7, 0.7**2, 0.7**3}


def test_building_leaves_the_groups_alone(name):
    groups = param_groups(vit(), 0.05)
    before = [(dict(group), list(group["names"])) for group in groups]
    build_optimizer(groups, name, lr=0.1)
    assert [(dict(group), list(group["names"])) for group in groups] == before


def test_it_learns(name):
    model = vit()
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16) % 5
    optimizer = build_optimizer(
        param_groups(model, 0.0), name, lr=0.2 if name in ("sgd", "momentum") else 0.01
    )
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(images), labels))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_saved_state_continues_bit_for_bit(name, tmp_path):
    """Five steps, a save through safetensors and JSON, five more: the same as ten."""
    straight = vit(attention="talking_heads")
    train(straight, build(straight, name), 10)

    first = vit(attention="talking_heads")
    optimizer = build(first, name)
    train(first, optimizer, 5)
    tensors, record = optimizer_state(optimizer)
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "optimizer.safetensors")
    text = json.dumps(record)

    second = vit(attention="talking_heads")
    second.load_state_dict(first.state_dict())
    resumed = build(second, name)
    load_optimizer_state(resumed, load_file(tmp_path / "optimizer.safetensors"), json.loads(text))
    train(second, resumed, 10, start=5)
    for (key, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), key


def test_a_sharded_state_is_saved_whole_and_continues_bit_for_bit(name):
    """FSDP2 in one process: its parameters and moments are DTensors as in many."""
    straight = vit()
    train(straight, build(straight, name), 6)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        first = vit()
        fully_shard(first, mesh=mesh)
        optimizer = build(first, name)
        train(first, optimizer, 3)
        tensors, record = optimizer_state(optimizer)
        assert not any(isinstance(value, DTensor) for value in tensors.values())
        resumed = build(first, name)
        load_optimizer_state(resumed, tensors, json.loads(json.dumps(record)))
        train(first, resumed, 6, start=3)
        for (key, a), b in zip(straight.named_parameters(), first.parameters(), strict=True):
            assert torch.equal(a, b.full_tensor()), key
    finally:
        dist.destroy_process_group()


def test_torchs_own_state_dict_works_too(name):
    straight = vit()
    train(straight, build(straight, name), 6)
    model = vit()
    optimizer = build(model, name)
    train(model, optimizer, 3)
    again = build(model, name)
    again.load_state_dict(optimizer.state_dict())
    train(model, again, 6, start=3)
    for a, b in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_before_the_first_step_is_empty_and_loads(name):
    tensors, record = optimizer_state(build(vit(), name))
    assert tensors == {}
    load_optimizer_state(build(vit(), name), tensors, json.loads(json.dumps(record)))


def test_keys_are_kind_and_parameter():
    model = vit()
    optimizer = build(model, "lamb")
    train(model, optimizer, 2)
    tensors, record = optimizer_state(optimizer)
    assert tensors["exp_avg/blocks.0.attn.qkv.weight"].shape == (48, 16)
    assert len(tensors) == 2 * len(list(model.parameters()))
    assert record["numbers"]["step/head.bias"] == 2


SPOILED = {
    "a tensor is gone": (
        lambda tensors, _: tensors.pop("exp_avg/head.weight"),
        "1 tensors are missing, the first 'exp_avg/head.weight'",
    ),
    "a tensor too many": (
        lambda tensors, _: tensors.update({"exp_avg/tail.weight": torch.zeros(1)}),
        "1 tensors are not in this run, the first 'exp_avg/tail.weight'",
    ),
    "a parameter is gone": (
        lambda _, record: record["parameters"].pop("head.bias"),
        "1 parameters are missing, the first 'head.bias'",
    ),
    "a parameter too many": (
        lambda _, record: record["parameters"].update(extra=[]),
        "1 parameters are not in this run, the first 'extra'",
    ),
    "another shape": (
        lambda tensors, _: tensors.update({"exp_avg/head.bias": torch.zeros(9)}),
        r"exp_avg/head.bias is \(9,\), the parameter \(5,\)",
    ),
    "another optimizer": (lambda _, record: record.update(optimizer="AdamW"), "saved by AdamW"),
    "other groups": (
        lambda _, record: record["numbers"].update({"step/blocks.0.attn.proj.bias": 7}),
        "were in other groups",
    ),
}


@pytest.mark.parametrize("case", list(SPOILED))
def test_a_state_that_does_not_fit_is_refused_whole(case):
    spoil, message = SPOILED[case]
    model = vit()
    optimizer = build(model, "lamb")
    train(model, optimizer, 2)
    tensors, record = optimizer_state(optimizer)
    tensors, record = dict(tensors), json.loads(json.dumps(record))
    spoil(tensors, record)
    fresh = build(vit(), "lamb")
    with pytest.raises(FathomsError, match=message) as caught:
        load_optimizer_state(fresh, tensors, record)
    assert "\n" not in str(caught.value)
    assert not fresh.state


def test_muon_takes_the_matrices_inside_blocks_only():
    optimizer = build(vit(readout="class_attention"), "muon")
    taken = {
        name for group in optimizer.param_groups if group["algorithm"] == "muon" for name in group["names"]
    }
    assert "blocks.1.mlp.fc2.weight" in taken
    assert "readout.blocks.0.attn.q.weight" in taken
    assert not taken & {"head.weight", "stem.proj.weight", "readout.queries", "blocks.0.attn.qkv.bias"}


def test_muon_is_torchs_muon_and_torchs_adamw():
    model, twin = vit(), vit()
    optimizer = build_optimizer(param_groups(model, 0.05), "muon", lr=0.002)
    named = dict(twin.named_parameters())
    inner, outer, plain = [], [], []
    for name, parameter in named.items():
        exempt = parameter.ndim == 1 or any(word in name for word in ("queries", "table", "positions"))
        place = inner if parameter.ndim == 2 and name.startswith("blocks") else plain if exempt else outer
        place.append(parameter)
    muon = torch.optim.Muon(inner, lr=0.002, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([{"params": outer}, {"params": plain, "weight_decay": 0.0}], weight_decay=0.05)
    for step in range(5):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(images).square().sum().backward()
        for own, parameter in named.items():
            parameter.grad = model.get_parameter(own).grad.clone()
        rate = 0.002 / (1 + step)
        set_lr(optimizer, rate)
        set_lr(muon, rate)
        set_lr(adamw, rate)
        for each in (optimizer, muon, adamw):
            each.step()
    taken = {id(parameter) for parameter in inner}
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        # Stacks may round otherwise; how much is in test_muon.py.
        assert torch.allclose(a, b, atol=4e-5) if id(b) in taken else torch.equal(a, b), name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lamp", {}, "--opt: no optimizer is called 'lamp'; did you mean 'lamb'"),
        ("adamw", {"momentum": 0.9}, "optimizer 'adamw' takes no momentum"),
        ("lamb", {"fused": True}, "optimizer 'lamb' takes no fused"),
        ("sgd", {"betas": (0.9, 0.99)}, "optimizer 'sgd' takes no betas"),
        ("sgd", {"momentum": 0.0}, "--momentum 0.0"),
        ("lamb", {"betas": (0.9, 1.0)}, "both betas must be below 1"),
        ("muon", {}, "the model has no matrix inside a block"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(name, options, message):
    with pytest.raises(FathomsError, match=message) as caught:
        build_optimizer(groups_of(problem()), name, **{"lr": 0.1} | options)
    assert "\n" not in str(caught.value)


def test_nothing_to_train_is_refused():
    with pytest.raises(FathomsError, match="no parameter is left to train"):
        build_optimizer(ParamGroups(), "lamb", lr=0.1)
