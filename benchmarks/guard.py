"""The cost of the guard and of a checkpoint in training: `python benchmarks/guard.py --device cuda --json`.

One update (forward, backward, gradient norm, optimizer) is timed as `fathoms train` runs it with the guard, without
it, and with the usual check that waits for the device. The rounds of the three are interleaved, and the share is
taken from the medians. Then one checkpoint is saved during training: the stall is the time of the updates around it
above their median, in updates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fathoms
from fathoms.training.checkpoint_save import AsyncSaver, file_sizes, gather
from fathoms.training.distributed import World
from fathoms.training.guard import Guard
from fathoms.training.job import RunOptions
from fathoms.training.learner import Learner
from fathoms.training.optimization import build_optimizer
from fathoms.training.run_folder import RunFolder
from fathoms.training.speed import Speed
from fathoms.training.step import ConditionalStep, Readback

CPU_SWITCHES = {"dim": 96, "heads": 2, "depth": 4, "image_size": 64}


class Updates:
    """One model in training on one batch, with three ways of checking its numbers."""

    def __init__(self, name: str, batch: int, device: torch.device, opt: str) -> None:
        torch.manual_seed(0)
        self.device, self.opt = device, opt
        small = {} if device.type == "cuda" else CPU_SWITCHES
        self.model = fathoms.create_model(name, **small).to(device)
        self.optimizer = build_optimizer(fathoms.param_groups(self.model, 0.05), opt, lr=1e-4)
        size = self.model.config.image_size
        self.images = torch.randn(batch, 3, size, size, device=device)
        self.labels = torch.randint(0, self.model.config.num_classes, (batch,), device=device)
        world = World(0, 1, device)
        self.readback, self.conditional_step = Readback(world), ConditionalStep(self.model, self.optimizer)
        self.guard, self.updates = Guard(RunOptions()), 0

    def _gradient(self) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return loss.detach(), nn.utils.get_total_norm(grads)

    def guarded(self) -> None:
        """As the training loop does it: skipped on the device, read one update later."""
        loss, norm = self._gradient()
        self.finish_previous()
        hold = self.readback.send(self.updates, 0, (self.updates, self.updates + 1), loss, norm, 0)
        self.conditional_step.step(hold)
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def finish_previous(self) -> None:
        """Read the numbers of the previous update."""
        report = self.readback.read()
        if report is not None:
            self.conditional_step.settle(report.nonfinite)
            assert self.guard.judge(report) is None or not report.nonfinite

    def bare(self) -> None:
        """No check; the norm is computed all the same, as clipping and logging need it."""
        self._gradient()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def waiting(self) -> None:
        """The usual check: the host waits for the device before each update."""
        loss, norm = self._gradient()
        if bool(torch.stack([loss.float(), norm.float()]).isfinite().all()):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def seconds(run: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds per update, over `count` in a row."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        run()
    wait(device)
    return (time.perf_counter() - began) / count


def wait(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def guard_cost(updates: Updates, rounds: int, count: int) -> dict[str, Any]:
    """Milliseconds per update in each way, and the cost of the checks in per cent."""
    ways = {"bare": updates.bare, "guarded": updates.guarded, "waiting": updates.waiting}
    for run in ways.values():
        seconds(run, 3, updates.device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(rounds):
        # Another goes first in each round, so that a slow drift does not favour one of them.
        names.append(names.pop(0))
        for name in names:
            times[name].append(seconds(ways[name], count, updates.device))
    updates.finish_previous()
    middle = {name: statistics.median(values) for name, values in times.items()}
    share = {name: 100 * (middle[name] / middle["bare"] - 1) for name in ("guarded", "waiting")}
    spread = 100 * (max(times["bare"]) / min(times["bare"]) - 1)
    return {
        **{f"{name}_ms": 1e3 * value for name, value in middle.items()},
        "guard_percent": share["guarded"],
        "waiting_percent": share["waiting"],
        "bare_spread_percent": spread,
    }


def save_stall(updates: Updates, folder: Path, count: int) -> dict[str, Any]:
    """Time that one checkpoint takes from the updates around it, in updates, and seconds until it is complete."""
    run_folder = RunFolder(folder)
    run_folder.open()
    saver = AsyncSaver(run_folder, 2, updates.device)
    sizes = file_sizes(updates.model, updates.opt, ema=False)
    saver.staging.reserve(sum(sizes.values()) + (1 << 22))
    scaler = torch.amp.GradScaler(updates.device.type, enabled=False)
    learner = Learner(updates.model, updates.model, None, None, updates.optimizer, scaler, Speed())

    def save() -> None:
        values = {"updates": updates.updates}
        saver.save(lambda stage: gather(learner, values, stage))

    stalls, until_whole = [], []
    usual = statistics.median(seconds(updates.guarded, 5, updates.device) for _ in range(3))
    for _ in range(3):
        wait(updates.device)
        began = time.perf_counter()
        updates.finish_previous()
        save()
        for _ in range(count):
            updates.guarded()
        wait(updates.device)
        stalls.append((time.perf_counter() - began) / usual - count)
        saver.wait()
        until_whole.append(time.perf_counter() - began)
    updates.finish_previous()
    run_folder.close()
    return {
        "checkpoint_mb": sum(sizes.values()) / 1e6,
        "step_ms": 1e3 * usual,
        "stall_steps": statistics.median(stalls),
        "stall_steps_each": stalls,
        "whole_after_s": statistics.median(until_whole),
    }


def main() -> None:
    """Measure; the last line of the output is one JSON object with `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--device", default="cpu", help="cpu (a small model) or cuda")
    parser.add_argument("--model", default="cait_s24_224")
    parser.add_argument("--batch-size", type=int, help="64 on a GPU, 4 on a CPU")
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="updates of one round")
    given = parser.parse_args()
    device = torch.device(given.device)
    batch = given.batch_size or (64 if device.type == "cuda" else 4)
    updates = Updates(given.model, batch, device, given.opt)
    report: dict[str, Any] = {"torch": torch.__version__, "model": given.model, "batch_size": batch}
    report |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "opt": given.opt}
    report |= guard_cost(updates, given.rounds, given.steps)
    with tempfile.TemporaryDirectory() as folder:
        report |= save_stall(updates, Path(folder) / "run", 2 * given.steps)
    print(
        f"{given.model}, {batch} images an update, {given.opt}: {report['bare_ms']:.2f} ms bare, "
        f"guard {report['guard_percent']:+.2f} %, a check that waits {report['waiting_percent']:+.2f} % "
        f"(spread of the bare rounds {report['bare_spread_percent']:.2f} %)\n"
        f"saving {report['checkpoint_mb']:.0f} MB in the background stalls {report['stall_steps']:.2f} updates; "
        f"complete after {report['whole_after_s']:.2f} s"
    )
    if given.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
