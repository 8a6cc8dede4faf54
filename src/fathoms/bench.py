"""Throughput and peak memory of training updates or inference, one model, perhaps timm's, next to another.

A training update is the one of `fathoms train`, on a batch that stays on the device. Contenders take turns of a few
runs each, and the median turn counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.errors import ConfigError
from fathoms.registry import check_name
from fathoms.surgery.accelerate import AccelerateReport, accelerate
from fathoms.training.compiling import (
    KEEPS,
    WARMUP,
    GraphedStep,
    compile_blocks,
    hide_advice,
    kept_for_backward,
)
from fathoms.training.distributed import World
from fathoms.training.job import Job
from fathoms.training.learner import TrainState, build_learner
from fathoms.training.objective import Objective
from fathoms.training.recipe import Recipe
from fathoms.training.speed import LAUNCHES, PRECISIONS, Speed, set_stream
from fathoms.training.step import Stepper

COMPILES = ("none", "model", "blocks")
MODES = ("default", "reduce-overhead")
"""Modes of torch.compile; the second replays CUDA graphs of its own."""


@dataclass(frozen=True)
class Setting:
    """Precision, compilation and launch of a contender.

    Args:
        precision: A policy of `fathoms.training.speed`.
        compile: Compile the whole "model", each of its "blocks", or "none".
        launch: Kernel by kernel ("eager"), or forward and backward pass as one CUDA graph ("graph").
        keep: What a compiled forward pass saves for the backward pass: "all" that torch would, or "lean", which
            recomputes element-wise results.
        mode: The mode of torch.compile, for models of other libraries.
    """

    precision: str = "bf16"
    compile: str = "blocks"
    launch: str = "graph"
    keep: str = "lean"
    mode: str = "default"

    def __post_init__(self) -> None:
        check_name(self.precision, PRECISIONS, "precision", "--precision")
        check_name(self.compile, COMPILES, "scope", "--compile")
        check_name(self.launch, LAUNCHES, "launch", "--launch")
        check_name(self.keep, KEEPS, "amount", "--keep")
        check_name(self.mode, MODES, "mode", "mode")


# The optimizer and the options of a measured update: AdamW, without clipping or a moving average.
RECIPE = Recipe(lr=1e-4)


@dataclass
class Contender:
    """A model compiled and warmed up; `run()` is one training update or one forward pass."""

    name: str
    run: Callable[[], object]
    setup_s: float = 0.0
    peak_gib: float | None = None


def prepare(
    name: str,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    mode: Literal["train", "infer"],
    setting: Setting,
    recipe: Recipe = RECIPE,
) -> Contender:
    """Run a model until it is compiled and captured, and measure its peak memory.

    A training update is that of `recipe`. The peak is counted from the memory in use before, and includes the model's
    weights.
    """
    cuda = images.is_cuda
    if setting.launch == "graph" and not cuda:
        raise ConfigError("--launch graph: needs a CUDA device; use eager")
    began = time.perf_counter()
    # The model may be on the device already.
    own = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda)
    before = torch.cuda.memory_allocated() - own if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    model = model.to(images.device)
    if mode == "train":
        contender = Contender(name, _training(model, images, labels, setting, recipe))
    else:
        contender = Contender(name, _inference(model, images, setting))
    with kept_for_backward(setting.keep):
        for _ in range(WARMUP + 3):
            contender.run()
    if cuda:
        torch.cuda.synchronize()
        contender.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    contender.setup_s = time.perf_counter() - began
    return contender


def training_update(
    model: nn.Module, setting: Setting, device: torch.device, channels: int = 3, recipe: Recipe = RECIPE
) -> Callable[[Batch], None]:
    """The update of `fathoms train` as a function of one batch, made of the same `Learner` and `Stepper`.

    It includes the gradient norm and clipping, the guard's readback of the previous update, the optimizer with
    its parameter groups, and the moving average if the recipe has one. The first calls compile.
    """
    if setting.mode != "default":
        model = compiled(model, setting)
    backend = "none" if setting.compile == "none" or setting.mode != "default" else "inductor"
    scope = "blocks" if setting.compile == "blocks" else "model"
    speed = Speed(setting.precision, backend, scope, setting.launch)
    set_stream(model, speed.precision)
    job, world = Job(None, type(model).__name__, None, recipe), World(0, 1, device)
    objective = Objective(recipe, model, (), device)
    stepper = Stepper(job, world, build_learner(job, world, model, objective, speed), objective, channels)
    state = TrainState(torch.zeros(4, dtype=torch.float64, device=device))

    def update(batch: Batch) -> None:
        stepper.accumulate(batch, parts=1, first=True)
        state.batch += 1
        norm = stepper.gradient_norm()
        stepper.finish_previous()
        stepper.apply(state, norm, recipe.lr, vote=0)
        state.updates += 1

    return update


def _training(
    model: nn.Module, images: Tensor, labels: Tensor, setting: Setting, recipe: Recipe
) -> Callable[[], object]:
    update = training_update(model, setting, images.device, images.shape[1], recipe)
    batch = Batch(images, labels, torch.arange(len(labels)), epoch=0, number=0)
    return lambda: update(batch)


def compiled(model: nn.Module, setting: Setting) -> nn.Module:
    """The model, its calls compiled whole, block by block, or not."""
    hide_advice()
    mode = None if setting.mode == "default" else setting.mode
    if setting.compile == "model":
        model.compile(dynamic=False, mode=mode)
    elif setting.compile == "blocks":
        compile_blocks(model, dynamic=False, mode=mode)
    return model


def _inference(model: nn.Module, images: Tensor, setting: Setting) -> Callable[[], object]:
    set_stream(model, setting.precision)
    model.eval().requires_grad_(False)
    autocast = setting.precision
    if setting.precision == "bf16":
        model, images, autocast = model.bfloat16(), images.bfloat16(), "fp32"
    runner = compiled(model, setting)

    def compute(images: Tensor) -> tuple[Tensor, ...]:
        enabled = autocast != "fp32"
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=enabled):
            return (runner(images),)

    run = GraphedStep(compute, []) if setting.launch == "graph" else compute
    return lambda: run(images)


def race(
    contenders: list[Contender],
    batch: int,
    *,
    turns: int = 5,
    steps: int = 5,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Measure contenders in turns of `steps` runs each; a row for each, from its median turn."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(1, turns + 1):
        for contender in contenders:
            times[contender.name].append(seconds(contender.run, steps))
        advance(turn)
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


def seconds(run: Callable[[], object], times: int) -> float:
    """Mean seconds of one run; on a GPU the host queues all of them before it waits."""
    if torch.cuda.is_available():
        run()
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


# As people run timm's models: compiled whole, under autocast; for inference in bfloat16 throughout. CUDA graphs are
# those of torch.compile's "reduce-overhead". Around timm's model an update is the same as around ours: its guard,
# optimizer and groups.
TIMM_SETTINGS = {
    "train": Setting("autocast", "model", "eager", "all"),
    "infer": Setting("bf16", "model", "eager", "all"),
}


def modes_of(setting: Setting, cuda: bool) -> list[Setting]:
    """A setting under each mode of torch.compile; one that replays CUDA graphs needs a GPU and a model compiled whole.

    Block by block such a graph finds the backward passes of other blocks waiting, and torch leaves its quick path.
    """
    if setting.compile != "model" or setting.launch == "graph" or not cuda:
        return [setting]
    return [replace(setting, mode=mode) for mode in MODES]


def prepare_modes(
    name: str,
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    mode: Literal["train", "infer"],
    setting: Setting,
) -> tuple[list[Contender], dict[str, str]]:
    """A contender for each mode, named "NAME, MODE", and why a mode could not run."""
    contenders: list[Contender] = []
    failed: dict[str, str] = {}
    for each in modes_of(setting, batch[0].is_cuda):
        try:
            contenders.append(prepare(label(name, each.mode), make(), *batch, mode, each))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if each.mode == "default":
                raise
            failed[each.mode] = " ".join(str(error).split())[:300]
    return contenders, failed


def label(name: str, mode: str) -> str:
    """The name of a contender under a mode."""
    return f"{name}, {mode}"


def quicker(rows: Mapping[str, dict[str, Any]], name: str, failed: Mapping[str, str]) -> dict[str, Any]:
    """The quickest of the rows of a contender, with its mode, and what each mode reached.

    >>> slow, quick = {"images_per_second": 1.0}, {"images_per_second": 2.0}
    >>> quicker({"timm, default": slow, "timm, reduce-overhead": quick}, "timm", {})["compile_mode"]
    'reduce-overhead'
    """
    own = {mode: rows[label(name, mode)] for mode in MODES if label(name, mode) in rows}
    best = max(own, key=lambda mode: own[mode]["images_per_second"])
    reached: dict[str, Any] = {mode: row["images_per_second"] for mode, row in own.items()}
    return {
        **own[best],
        "compile_mode": best,
        "modes": reached,
        **({"failed": dict(failed)} if failed else {}),
    }


def accelerated_setting(mode: str, launch: str, compile: str = "blocks") -> Setting:
    """How an accelerated model runs at its best: as timm's does in its precision, with compiled blocks in a graph."""
    return Setting("autocast" if mode == "train" else "bf16", compile, launch, "lean")


def prepare_accelerated(
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    mode: Literal["train", "infer"],
    setting: Setting,
) -> tuple[Contender | None, AccelerateReport]:
    """The contender, or None where nothing could be replaced; and the report, which says so."""
    model = make().to(batch[0].device)
    report = accelerate(model, images=batch[0][:2])
    return (prepare("accelerated", model, *batch, mode, setting) if len(report) else None), report
