"""How fast a model trains and answers, in images per second, beside another on the same inputs.

A training step is forward, backward and fused AdamW on a batch that stays on the device. Contenders take turns,
a few steps each, and the median turn counts.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.registry import check_name
from fathoms.train.precision.compile import KEEPS, compile_blocks, kept_for_backward
from fathoms.train.precision.cuda_graph import WARMUP, GraphedStep
from fathoms.train.precision.master_weights import WorkingCopy
from fathoms.train.precision.policy import PRECISIONS, SUMS, compile_options, set_stream

COMPILES = ("none", "model", "blocks")
LAUNCHES = ("eager", "graph")


@dataclass(frozen=True)
class Setting:
    """How a model is run.

    Args:
        precision: A policy of `fathoms.train.precision.policy`.
        compile: What is compiled as one: the model, each block, or nothing.
        launch: Kernel by kernel, or each step as one CUDA graph.
        keep: What a compiled forward pass keeps for the backward pass: all that torch would, or "lean", without
            what can be made again element by element.
        sums: "fused" lets compiled products add to the stream, "separate" leaves that to torch.
    """

    precision: str = "bf16"
    compile: str = "blocks"
    launch: str = "graph"
    keep: str = "lean"
    sums: str = "fused"

    def __post_init__(self) -> None:
        check_name(self.precision, PRECISIONS, "precision", "bench.precision")
        check_name(self.compile, COMPILES, "compile scope", "bench.compile")
        check_name(self.launch, LAUNCHES, "launch", "bench.launch")
        check_name(self.keep, KEEPS, "amount", "bench.keep")
        check_name(self.sums, SUMS, "form", "bench.sums")


# As people run timm's models: compiled whole, under autocast; for inference in bfloat16 throughout.
TIMM_SETTINGS = {
    "train": Setting("autocast", "model", "eager", "all", "separate"),
    "infer": Setting("bf16", "model", "eager", "all", "separate"),
}


@dataclass
class Contender:
    """A model made ready: `step()` runs it once; what it took to make it so."""

    name: str
    step: Callable[[], object]
    setup_s: float = 0.0
    peak_gib: float | None = None


def prepare(
    name: str,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    mode: Literal["train", "infer"],
    setting: Setting,
) -> Contender:
    """Put a model to work and run it until everything is compiled and captured; measures its peak memory.

    The peak counts from the memory in use before, with the model's own weights in it.
    """
    cuda = images.is_cuda
    if setting.launch == "graph" and not cuda:
        raise ConfigError("--launch graph needs a CUDA device; use eager")
    began = time.perf_counter()
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    build = _training if mode == "train" else _answering
    contender = Contender(name, build(model.to(images.device), images, labels, setting))
    with kept_for_backward(setting.keep):
        for _ in range(WARMUP + 3):
            contender.step()
    if cuda:
        torch.cuda.synchronize()
        contender.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    contender.setup_s = time.perf_counter() - began
    return contender


def compiled(model: nn.Module, setting: Setting) -> nn.Module:
    """The model compiled whole, block by block, or not."""
    if setting.compile == "none":
        return model
    options = compile_options(sums=setting.sums)
    if setting.compile == "model":
        return cast(nn.Module, torch.compile(model, **options))
    compile_blocks(model, **options)
    return model


@contextlib.contextmanager
def _autocast(device: torch.device, precision: str) -> Iterator[None]:
    with torch.autocast(device.type, torch.bfloat16, enabled=precision != "fp32"):
        yield


def training_step(
    model: nn.Module, setting: Setting, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward, backward and fused AdamW on images and their classes or soft targets; gives the loss.

    The first calls compile, and with `launch="graph"` the loss is overwritten by the next call.
    """
    set_stream(model, setting.precision)
    model.train()
    copies = WorkingCopy(model) if setting.precision == "bf16" else None
    student = model if copies is None else copies.module
    runner = compiled(student, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=device.type == "cuda")

    def compute(images: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with _autocast(images.device, setting.precision):
            loss = F.cross_entropy(runner(images).float(), targets)
        loss.backward()
        return (loss.detach(),)

    run = GraphedStep(compute, student.parameters()) if setting.launch == "graph" else compute

    def step(images: Tensor, targets: Tensor) -> Tensor:
        (loss,) = run(images, targets)
        if copies is not None:
            copies.pull_gradients()
        optimizer.step()
        if copies is not None:
            copies.push_weights()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _training(model: nn.Module, images: Tensor, labels: Tensor, setting: Setting) -> Callable[[], object]:
    step = training_step(model, setting, images.device)
    return lambda: step(images, labels)


def _answering(model: nn.Module, images: Tensor, labels: Tensor, setting: Setting) -> Callable[[], object]:
    del labels
    set_stream(model, setting.precision)
    model.eval().requires_grad_(False)
    autocast = setting.precision
    if setting.precision == "bf16":
        model, images, autocast = model.bfloat16(), images.bfloat16(), "fp32"
    runner = compiled(model, setting)

    def compute(images: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), _autocast(images.device, autocast):
            return (runner(images),)

    run = GraphedStep(compute, []) if setting.launch == "graph" else compute
    return lambda: run(images)


def race(
    contenders: list[Contender], batch: int, *, turns: int = 5, steps: int = 5
) -> dict[str, dict[str, Any]]:
    """Images per second of each, the median of turns of a few steps, taken one after the other."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(turns):
        for contender in contenders:
            times[contender.name].append(_seconds(contender.step, steps))
    result: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        own = times[contender.name]
        middle = statistics.median(own)
        result[contender.name] = {
            "images_per_second": batch / middle,
            "ms": 1e3 * middle,
            "spread": (max(own) - min(own)) / middle,
            "peak_gib": contender.peak_gib,
            "setup_s": contender.setup_s,
        }
    return result


def _seconds(step: Callable[[], object], steps: int) -> float:
    """Seconds of one step, over a few of them with the device left to run behind."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def device_limits() -> dict[str, float]:
    """Matrix and copy rate of the CUDA device, on random data."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(big)
    return {
        "matrix_tflops": 2 * 8192**3 / _seconds(lambda: a @ a, 20) / 1e12,
        "copy_tbps": 2 * big.nbytes / _seconds(lambda: target.copy_(big), 20) / 1e12,
    }


def shares_of_limit(
    flops: int, peak_gib: float, ms: float, limits: dict[str, float], mode: str
) -> dict[str, float]:
    """How much of a step's time the matrix units would need at their measured rate, and the memory at its own.

    A backward pass has twice the products of a forward pass. The least that moves is every byte of the peak,
    written once and read once.
    """
    passes = 3 if mode == "train" else 1
    return {
        "matrix_share": 2 * passes * flops / (limits["matrix_tflops"] * 1e9) / ms,
        "bytes_share": 2 * peak_gib * 2**30 / (limits["copy_tbps"] * 1e9) / ms,
    }


def make_timm(name: str, **options: Any) -> nn.Module:
    """One of timm's models by name, without drop-path."""
    try:
        import timm
    except ImportError as error:
        raise ConfigError("--against timm needs an extra; pip install 'fathoms[timm]'") from error
    check_name(name, timm.list_models(), "timm model", "--against timm")
    return cast(nn.Module, timm.create_model(name, **options))
