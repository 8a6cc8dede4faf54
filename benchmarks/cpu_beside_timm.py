"""Models beside timm's on a CPU, in turns in one process: `python benchmarks/cpu_beside_timm.py`.

A row is a model, train or infer, eager or compiled, a batch and a number of threads. Both sides have the same weights
and images. A round times one and then the other, the next round the other way round; a row keeps the median of the
rounds' ratios (timm's seconds over ours: above 1 is faster) with its quartiles. Rows "folded" set the folded model
against our own. The model is run in training and in evaluation before it is timed, so that compiled code is met as
runs meet it, and a recompilation beyond one for each mode is an error. results/cpu_beside_timm.json has all rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fathoms

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "deit3_small_patch16_224", "cait_xxs24_224")
RESULT = Path(__file__).parents[1] / "results" / "cpu_beside_timm.json"


def pair(name: str, other: str, size: int) -> tuple[nn.Module, nn.Module]:
    """Our model, and timm's or our own folded, with the same weights off their start."""
    torch.manual_seed(0)
    ours = fathoms.create_model(name, image_size=size).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    if other == "folded":
        return fathoms.fold(ours)[0], ours
    theirs = timm.create_model(name, img_size=size).eval()
    fathoms.load_weights(ours, theirs.state_dict())
    return ours, theirs


def step(model: nn.Module, images: Tensor, mode: str) -> Callable[[], None]:
    """One update's forward and backward pass, or one inference."""

    def train() -> None:
        model.zero_grad(set_to_none=True)
        model(images).square().mean().backward()

    @torch.inference_mode()
    def infer() -> None:
        model(images)

    return train if mode == "train" else infer


def warm(model: nn.Module, images: Tensor, mode: str) -> None:
    """Alternate between evaluation and training as a run does, and end in the mode that is timed."""
    for now in ("infer", "train", "infer", "train", mode) if mode == "train" else ("infer", "infer"):
        model.train(now == "train")
        step(model, images, now)()


def ratios(ours: Callable[[], None], theirs: Callable[[], None], seconds: float) -> list[float]:
    """Their time over ours, of rounds in turns, for about so many seconds and at least nine rounds."""
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < 9 or time.perf_counter() - start < seconds:
        taken = {}
        for run in (ours, theirs) if len(found) % 2 else (theirs, ours):
            began = time.perf_counter()
            run()
            taken[run] = time.perf_counter() - began
        found.append(taken[theirs] / taken[ours])
    return found


def measure(
    name: str, other: str, mode: str, how: str, batch: int, threads: int, size: int, seconds: float
) -> dict[str, object]:
    """One row."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    counters.clear()
    models = pair(name, other, size)
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))
    if how == "compiled":
        models = tuple(torch.compile(model) for model in models)
    for model in models:
        warm(model, images, mode)
    # One graph of each model for evaluation, one for training.
    graphs = counters["stats"]["unique_graphs"]
    if graphs > 4 or counters["recompile_limit"]:
        raise SystemExit(f"{name} {mode} {how}: {graphs} graphs were compiled, for two models in two modes")
    found = ratios(*(step(model, images, mode) for model in models), seconds)
    low, middle, high = statistics.quantiles(found, n=4)
    row = {"model": name, "beside": other, "mode": mode, "how": how, "batch": batch, "threads": threads}
    row |= {"ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3), "rounds": len(found)}
    print(json.dumps(row), flush=True)
    return row


def processor() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def main() -> None:
    """Measure all rows, or those that are asked for, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--mode", choices=("train", "infer"), action="append")
    parser.add_argument("--how", choices=("eager", "compiled"), action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    cases = itertools.product(
        given.threads or (1, 2),
        given.model or MODELS,
        given.how or ("eager", "compiled"),
        given.mode or ("train", "infer"),
        given.batch or (1, 8),
    )
    rows = [
        measure(name, other, mode, how, batch, threads, given.image_size, given.seconds)
        for threads, name, how, mode, batch in cases
        for other in (("timm", "folded") if mode == "infer" else ("timm",))
    ]
    about = {"processor": processor(), "torch": torch.__version__, "timm": timm.__version__}
    given.output.write_text(
        json.dumps({**about, "image_size": given.image_size, "rows": rows}, indent=1) + "\n"
    )
    slower = [row for row in rows if float(str(row["ratio"])) < 1]
    print(json.dumps({"rows": len(rows), "below one": len(slower), "output": str(given.output)}))


if __name__ == "__main__":
    main()
