"""Cost of a model: parameters, multiplications, saved activations and time, by part, measured on one batch."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fathoms.models.param_groups import state_bytes
from fathoms.optimizer_facts import OptimizerName
from fathoms.parts.modes import hooked, in_inference
from fathoms.probes.blocks import branch_of, find_blocks, unwrap

PARTS = ("stem", "attention", "mlp", "rest")
_STEM = re.compile(r"stem|patch_embed|conv_proj|embeddings|pos_embed|position", re.IGNORECASE)
WARMUPS, TURNS = 1, 3


@dataclass
class PartCost:
    """One part of a model; `attention` and `mlp` are those of all blocks, with their norms and scales.

    Args:
        parameters: Number of parameters.
        multiplications: Of one image's forward pass, in matrix products and convolutions.
        saved: Bytes that one image leaves for the backward pass.
        fixed: Bytes that a batch of any size leaves for it, such as autocast's copies of the weights.
        seconds: Of one image's forward pass, the median of three batches.
        floor: Seconds that its multiplications take at the speed of a large matrix product here.
    """

    parameters: int = 0
    multiplications: float = 0.0
    saved: float = 0.0
    fixed: float = 0.0
    seconds: float = 0.0
    floor: float = 0.0


@dataclass
class Cost:
    """The cost of each part, and of the whole."""

    parts: dict[str, PartCost] = field(default_factory=dict)
    peak: float = 0.0
    """Multiplications per second of a large matrix product on this device."""

    def total(self, name: str) -> float:
        return sum(getattr(part, name) for part in self.parts.values())


def part_of(module: str, blocks: list[str]) -> str:
    """The part that a module belongs to, by its name.

    >>> part_of("blocks.3.attn.qkv", ["blocks.3"]), part_of("stem.proj", []), part_of("head", [])
    ('attention', 'stem', 'rest')
    """
    for block in blocks:
        if module.startswith(f"{block}."):
            return "attention" if branch_of(module.removeprefix(f"{block}.")) == "attn" else "mlp"
    return "stem" if _STEM.search(module) else "rest"


class _Where:
    """The part whose code is running, kept by hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        self.stack = ["rest"]
        self.blocks = list(find_blocks(model))
        self.parts = {name: part_of(name, self.blocks) for name, _ in model.named_modules()}
        self.listeners: list[Any] = []

    def install(self, model: nn.Module) -> list[Any]:
        handles = []
        for name, module in model.named_modules():
            if not name or name in self.blocks or not list(module.parameters(recurse=True)):
                continue
            handles.append(
                module.register_forward_pre_hook(lambda *_, part=self.parts[name]: self._move(part))
            )
            handles.append(module.register_forward_hook(lambda *_: self._move(None)))
        return handles

    def _move(self, part: str | None) -> None:
        for listener in self.listeners:
            listener(self.stack[-1])
        if part is None:
            self.stack.pop()
        else:
            self.stack.append(part)

    @property
    def part(self) -> str:
        return self.stack[-1]


class _Multiplications(TorchDispatchMode):
    """Counts the multiplications of matrix products, convolutions and attention, by part."""

    def __init__(self, where: _Where) -> None:
        super().__init__()
        self.where = where
        self.found: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            # The registry counts a multiplication and its addition as two.
            self.found[self.where.part] += count(*args, **(kwargs or {}), out_val=result) / 2
        return result


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Run torch's own TransformerEncoderLayer operation by operation: its fused one counts no multiplications."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def measure_cost(model: nn.Module, images: Tensor, amp: torch.dtype | None = None) -> Cost:
    """The cost of each part of a model, on a batch of images; the model is left as it is.

    Args:
        model: Any model with transformer blocks.
        images: A batch; every number is per image.
        amp: Dtype of autocast, as in training; None is float32.
    """
    model = unwrap(model)
    where = _Where(model)
    costs = {part: PartCost() for part in PARTS}
    for name, parameter in model.named_parameters():
        costs[part_of(name, where.blocks)].parameters += parameter.numel()
    with in_inference(model), hooked(*where.install(model)), _autocast(images, amp):
        with torch.no_grad(), _Multiplications(where) as counted, _without_fused_layers():
            model(images)
        saved, fixed = _saved_bytes(model, images, where)
        seconds = _seconds(model, images, where)
    peak = matrix_speed(images.device, amp or torch.float32)
    for part, cost in costs.items():
        cost.multiplications = counted.found[part] / len(images)
        cost.saved, cost.fixed = saved[part], fixed[part]
        cost.seconds = seconds[part] / len(images)
        cost.floor = cost.multiplications / peak
    return Cost({part: cost for part, cost in costs.items() if cost.parameters or cost.multiplications}, peak)


def update_memory(
    model: nn.Module, images: Tensor, batch_size: int, policy: str, opt: OptimizerName
) -> float:
    """Bytes of a training update with batches of `batch_size`, measured on few images; see `training_memory`."""
    where, amp = _Where(model), None if policy == "fp32" else torch.bfloat16
    with in_inference(model), hooked(*where.install(model)), _autocast(images, amp):
        saved, fixed = _saved_bytes(model, images, where)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = state_bytes(model, opt)
    return training_memory(
        parameters, state, sum(saved.values()), batch_size, policy, fixed=sum(fixed.values())
    )


def _autocast(images: Tensor, amp: torch.dtype | None) -> Any:
    return torch.autocast(images.device.type, dtype=amp, enabled=amp is not None)


def _saved_bytes(
    model: nn.Module, images: Tensor, where: _Where
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes kept for the backward pass by part: those of each further image, and those of a batch of any size."""
    count = len(images)
    once, twice = (_kept_bytes(model, batch, where) for batch in (images, torch.cat([images, images])))
    each = {part: (twice[part] - once[part]) / count for part in PARTS}
    return each, {part: once[part] - count * each[part] for part in PARTS}


def _kept_bytes(model: nn.Module, images: Tensor, where: _Where) -> dict[str, float]:
    """Bytes that a batch keeps for the backward pass by part, each storage once; parameters do not count."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[str, float] = defaultdict(float)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            found[where.part] += storage.nbytes()
            # An address may be given to the next tensor once this one is freed.
            kept.append(tensor.detach())
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return found


def _seconds(model: nn.Module, images: Tensor, where: _Where) -> dict[str, float]:
    """Seconds of a forward pass by part, the median of a few."""
    turns = []
    for _ in range(WARMUPS + TURNS):
        spent: dict[str, float] = defaultdict(float)
        with torch.no_grad(), _clock(where, spent, images.is_cuda):
            model(images)
        turns.append(spent)
    return {part: sorted(turn[part] for turn in turns[WARMUPS:])[TURNS // 2] for part in PARTS}


@contextmanager
def _clock(where: _Where, spent: dict[str, float], cuda: bool) -> Iterator[None]:
    """Add the time between two moves to the part that was running; a GPU is waited for at each."""

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    last = now()

    def moved(part: str) -> None:
        nonlocal last
        here = now()
        spent[part] += here - last
        last = here

    where.listeners.append(moved)
    try:
        yield
        moved(where.part)
    finally:
        where.listeners.remove(moved)


def matrix_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications per second of a large matrix product here, the best of a few."""
    side = 8192 if device.type == "cuda" else 1024
    a = torch.randn(side, side, device=device, dtype=dtype)
    best = float("inf")
    with torch.no_grad():
        for _ in range(4):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            a @ a
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
    return side**3 / best


def training_memory(
    parameters: int, state: int, saved: float, batch_size: int, policy: str, *, fixed: float = 0.0
) -> float:
    """Bytes of a training update: weights, gradients, the optimizer's state, and the batch's activations.

    Args:
        parameters: Number of parameters.
        state: Bytes of the optimizer's state; see `state_bytes`.
        saved: Bytes of activations that an image leaves under this policy.
        batch_size: Images of a batch.
        policy: "bf16" keeps a bfloat16 copy of weights and gradients beside the float32 ones.
        fixed: Bytes that a batch of any size leaves besides.
    """
    copy = 4 if policy == "bf16" else 0
    return parameters * (4 + 4 + copy) + state + saved * batch_size + fixed
