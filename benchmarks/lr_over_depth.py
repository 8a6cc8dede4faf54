r"""Does the best learning rate stay as a ViT gets deeper? Short runs on CIFAR-10, as three `fathoms compare` commands.

    python benchmarks/lr_over_depth.py cifar10.npz              # print the commands and what they cost
    python benchmarks/lr_over_depth.py cifar10.npz --run --budget 520 --archive OUT/lr_over_depth.tar.gz
    python benchmarks/lr_over_depth.py cifar10.npz --run --budget 520 --begin BACK/lr_over_depth.tar.gz \
        --archive OUT/lr_over_depth.tar.gz                      # goes on where the archive ends
    python benchmarks/lr_over_depth.py cifar10.npz --summarise --begin BACK/lr_over_depth.tar.gz

The last one writes results/lr_over_depth.{json,md,svg}, also of a part. About ten minutes on an H200 in all, in one
call or several. It can be killed at any time: every 20 seconds the finished runs go into the archive, and `--begin`
reads it where the folder of the runs is gone. `--tiny` shows on a CPU and the digits that all of this works.

5 learning rates x 3 seeds at each of 4 depths, under three residual methods, which run side by side. First one seed of
everything, then the others, so that a whole picture is there early. The budget is short, two epochs: what is asked is
where the valley lies, not how good a model gets. CompleteP's base is the shallowest model.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison_archive import ENDED, UNFINISHED, cells_of, exit_code, run_packing, unpack
from lr_over_depth_picture import as_picture
from mps import mps

RESULTS = Path(__file__).parents[1] / "results"
METHODS = ("none", "layerscale", "completep")
DEPTHS = (6, 12, 24, 48)
RATES = ("0.00016", "0.0004", "0.001", "0.0025", "0.00625")
SEEDS = 3
EPOCHS = 2
# Measured on an H200: images of 32 pixels a second in training 12 blocks of 192 channels, patches of 4.
IMAGES_PER_SECOND = 58_000
IMAGES = 47_500
# What a run takes beside its training, and what compiling one depth takes.
OVERHEAD_S, COMPILE_S = 1.0, 10.0

SHAPE = ("--recipe", "cifar", "--dim", "192", "--heads", "3", "--position", "learned", "--qk-norm", "none")
TRAINING = ("--opt", "adamw", "--weight-decay", "0.05", "--clip-grad", "1", "--warmup-epochs", "0.5")
FAST = ("--precision", "bf16", "--torchcompile", "inductor", "--compile-scope", "blocks", "--launch", "graph")
LEAN = ("--eval-interval", str(EPOCHS), "--probe-interval", "0", "--keep", "none")
TINY = (
    *("--image-size", "8", "--patch-size", "4", "--dim", "16", "--heads", "2", "--batch-size", "256"),
    *("--opt", "adamw", "--warmup-epochs", "0.5", "--device", "cpu", "--jobs", "1"),
)


@dataclass(frozen=True)
class Sweep:
    """One sweep: data, folder and device; CIFAR-10 on a GPU, or the digits on a CPU."""

    data: str
    output: Path
    tiny: bool = False

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths, in the order of the table."""
        return (1, 2) if self.tiny else DEPTHS

    @property
    def rates(self) -> tuple[str, ...]:
        """The learning rates."""
        return RATES[2:4] if self.tiny else RATES

    def command(self, method: str, seeds: int, budget: float | None = None) -> list[str]:
        """The comparison of one residual method."""
        data = ["--recipe", "digits"] if self.tiny else [self.data, *SHAPE, *TRAINING]
        base = ["--base-depth", str(self.depths[0])] if method == "completep" else []
        depths = ",".join(map(str, self.depths))
        axes = ["--axis", f"depth={depths}", "--axis", f"lr={','.join(self.rates)}"]
        # All pairs of twenty arms would be tested after every run.
        judge = ["--baseline", f"depth={self.depths[0]}, lr={self.rates[0]}"]
        judge += ["--metric", "loss", "--smallest-difference", "0.02"]
        rest = ["--epochs", str(EPOCHS), "--seeds", str(seeds), "--residual", method, *base]
        where = ["--output", str(self.output), "--experiment", method]
        limit = [] if budget is None else ["--budget", f"{max(1, int(budget))}s"]
        return [
            *("fathoms", "compare", *data, *rest, *axes, *judge, *LEAN),
            *(TINY if self.tiny else FAST),
            *where,
            *limit,
        ]


def seconds() -> float:
    """Expected time of everything one run after the other, at a speed that falls with the depth."""
    training = sum(EPOCHS * IMAGES * depth / (12 * IMAGES_PER_SECOND) for depth in DEPTHS)
    runs = len(METHODS) * len(RATES) * SEEDS
    return runs * (training + OVERHEAD_S * len(DEPTHS)) + len(METHODS) * len(DEPTHS) * COMPILE_S


class Methods:
    """The comparisons of all methods side by side, until all are done or the time is used up.

    Args:
        sweep: What is trained.
        together: How many run at a time.
        budget: Seconds for everything; None without a limit.
    """

    def __init__(self, sweep: Sweep, together: int, budget: float | None) -> None:
        self.sweep, self.slots = sweep, threading.Semaphore(together)
        self.end = None if budget is None else time.monotonic() + budget
        self.codes: dict[str, int] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped = False

    def run(self, archive: Path | None) -> int:
        """Run what is missing, and keep what is finished; 0, 75 where runs are left, or the first other code."""
        works = [functools.partial(self._method, method) for method in METHODS]
        run_packing(works, self._stop, self.sweep.output, archive)
        return exit_code(self.codes.values())

    def _method(self, method: str) -> None:
        """First one seed of a method's arms, then all."""
        with self.slots:
            for seeds in self._steps(method):
                left = None if self.end is None else self.end - time.monotonic()
                if self.stopped or (left is not None and left < 5):
                    self.codes[method] = UNFINISHED
                    return
                words = self.sweep.command(method, seeds, left)
                with (self.sweep.output / f"{method}.log").open("ab") as log:
                    self.running[method] = subprocess.Popen(
                        [sys.executable, "-m", *words], stdout=log, stderr=subprocess.STDOUT
                    )
                    self.codes[method] = self.running[method].wait()
                print(
                    f"{method}, {seeds} seeds: exit {self.codes[method]}, {self._count(method)}", flush=True
                )
                if self.codes[method]:
                    tail = (self.sweep.output / f"{method}.log").read_text(errors="replace").splitlines()[-4:]
                    print("\n".join(f"  {line}" for line in tail), flush=True)
                    return

    def _steps(self, method: str) -> tuple[int, ...]:
        """Numbers of seeds, in turn: a comparison never takes seeds away, and a step that is done is left out."""
        plan = self.sweep.output / method / "plan.json"
        grown = plan.is_file() and json.loads(plan.read_text())["seeds"] == SEEDS
        return (SEEDS,) if grown else (1, SEEDS)

    def _count(self, method: str) -> str:
        cells = cells_of(self.sweep.output / method)
        done = sum(cell["status"] in ENDED for cell in cells)
        return f"{done} of {len(self.sweep.depths) * len(self.sweep.rates) * SEEDS} runs are there"

    def _stop(self) -> None:
        """Pass a signal on: the comparisons save and end."""
        self.stopped = True
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()


def read(sweep: Sweep) -> list[dict[str, Any]]:
    """One row for each method, depth and rate: loss and accuracy of its seeds, and how many diverged or failed."""
    rows = []
    for method in METHODS:
        cells = cells_of(sweep.output / method)
        for depth in sweep.depths:
            for rate in sweep.rates:
                own = [cell for cell in cells if cell["arm"] == {"depth": str(depth), "lr": rate}]
                done = {str(cell["seed"]): cell for cell in own if cell["status"] in ("done", "stalled")}
                rows.append(
                    {
                        "residual": method,
                        "depth": depth,
                        "lr": float(rate),
                        "loss": {seed: cell["loss"] for seed, cell in done.items()},
                        "top1": {seed: cell["top1"] for seed, cell in done.items()},
                        "diverged": sum(cell["status"] == "diverged" for cell in own),
                        "failed": sum(cell["status"] == "failed" for cell in own),
                    }
                )
    if not any(row["loss"] for row in rows):
        sys.exit(f"{sweep.output}: no run has ended yet; use --run first")
    return rows


def of(rows: Sequence[dict[str, Any]], method: str, depth: int) -> list[dict[str, Any]]:
    """The rows of one curve, by rate."""
    return [row for row in rows if (row["residual"], row["depth"]) == (method, depth)]


def best(rows: Sequence[dict[str, Any]], seed: str | None = None) -> dict[str, Any] | None:
    """The rate of least loss, of one seed or on average, among those of which no run diverged or failed.

    `fitted` is the lowest point of the parabola through it and its neighbours over log(lr); at the edge, itself.
    """
    points = [
        (row["lr"], statistics.fmean(row["loss"].values()) if seed is None else row["loss"][seed], row)
        for row in rows
        if not (row["diverged"] or row["failed"]) and (seed in row["loss"] if seed else row["loss"])
    ]
    if not points:
        return None
    index = min(range(len(points)), key=lambda place: points[place][1])
    rate, _, row = points[index]
    edge = rate in (rows[0]["lr"], rows[-1]["lr"])
    inside = 0 < index < len(points) - 1
    fitted = _lowest(points[index - 1 : index + 2]) if inside else rate
    return {"lr": rate, "fitted": fitted, "edge": edge, "row": row}


def _lowest(three: Sequence[tuple[float, float, Any]]) -> float:
    """Where the parabola through three points over log(x) is lowest."""
    (a, fa, _), (b, fb, _), (c, fc, _) = [(math.log(x), y, row) for x, y, row in three]
    above = (b - a) ** 2 * (fb - fc) - (b - c) ** 2 * (fb - fa)
    below = (b - a) * (fb - fc) - (b - c) * (fb - fa)
    return math.exp(b - above / (2 * below)) if below else math.exp(b)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The best rate of each method and depth, and all losses, as Markdown."""
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    runs, planned = sum(len(row["loss"]) + row["diverged"] for row in rows), len(rows) * SEEDS
    lines = [
        "# The best learning rate by depth",
        "",
        f"Made by `python benchmarks/lr_over_depth.py cifar10.npz --run` and `--summarise`: CIFAR-10, {EPOCHS} epochs "
        f"of 47,500 images (a short budget), AdamW, 192 channels, {SEEDS} seeds; {runs} of {planned} runs ended. "
        "CompleteP's base depth is the smallest.",
        "",
        "## Rate of the least test loss",
        "",
        "The lowest point of the parabola through the best rate and its neighbours over log(lr), of the mean loss; in "
        "brackets the least and greatest over seeds, then the accuracy at the best rate tried. * is at the edge of the "
        "rates tried: the true one may lie beyond it.",
        "",
        "| residual | " + " | ".join(f"depth {depth}" for depth in depths) + " | largest / smallest |",
        "|---" * (len(depths) + 2) + "|",
    ]
    for method in METHODS:
        found = [best(of(rows, method, depth)) for depth in depths]
        cells = [_best_cell(of(rows, method, depth)) for depth in depths]
        known = [each["fitted"] for each in found if each]
        spread = f"{max(known) / min(known):.1f}" if len(known) == len(depths) else "–"
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {spread} |")
    lines += ["", "![test loss against learning rate](lr_over_depth.svg)", "", "## Test loss, mean ± sd", ""]
    lines += [
        "| residual | depth | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---" * (len(rates) + 2) + "|",
    ]
    for method in METHODS:
        for depth in depths:
            cells = [_loss_cell(row) for row in of(rows, method, depth)]
            lines.append(f"| {method} | {depth} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _best_cell(rows: Sequence[dict[str, Any]]) -> str:
    found = best(rows)
    if found is None:
        return "–"
    seeds = sorted({seed for row in rows for seed in row["loss"]})
    each = [one["fitted"] for one in (best(rows, seed) for seed in seeds) if one]
    star = "*" if found["edge"] else ""
    accuracy = statistics.fmean(found["row"]["top1"].values())
    return f"{found['fitted']:.2g}{star} ({min(each):.2g} to {max(each):.2g}), {accuracy:.1f} %"


def _loss_cell(row: dict[str, Any]) -> str:
    losses = list(row["loss"].values())
    texts = [f"{statistics.fmean(losses):.3f}"] if losses else []
    if len(losses) > 1:
        texts[0] += f" ± {statistics.stdev(losses):.3f}"
    texts += [f"{row[kind]} {kind}" for kind in ("diverged", "failed") if row[kind]]
    return ", ".join(texts) or "not run"


def main() -> int:
    """Print, run or summarise the sweeps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="CIFAR-10, as for fathoms train")
    parser.add_argument("--output", type=Path, default=Path("runs/lr_over_depth"), help="folder of the runs")
    parser.add_argument("--run", action="store_true", help="run the commands")
    parser.add_argument("--budget", type=float, help="seconds after which to stop; the same command goes on")
    parser.add_argument("--together", type=int, default=3, help="methods that run at a time")
    parser.add_argument("--archive", type=Path, help="file that the ended runs are put into as they end")
    parser.add_argument("--begin", type=Path, help="such a file, of an earlier call")
    parser.add_argument("--summarise", action="store_true", help="write table and picture")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of table and picture")
    parser.add_argument("--tiny", action="store_true", help="the digits on a CPU, to see that it works")
    arguments = parser.parse_args()
    sweep, code = Sweep(arguments.data, arguments.output, arguments.tiny), 0
    if arguments.run or arguments.summarise:
        unpack(arguments.begin, sweep.output)
    else:
        for method in METHODS:
            print(shlex.join(sweep.command(method, SEEDS)))
        runs = len(METHODS) * len(DEPTHS) * len(RATES) * SEEDS
        print(f"# {runs} runs, {seconds() / 60:.0f} minutes one after the other, less side by side")
    if arguments.run:
        with tempfile.TemporaryDirectory() as scratch:
            alone = arguments.together == 1 or arguments.tiny
            with nullcontext(True) if alone else mps(Path(scratch) / "mps") as shared:
                if not shared:
                    print("NVIDIA's MPS does not run here: the methods take turns on the GPU", flush=True)
                code = Methods(sweep, arguments.together, arguments.budget).run(arguments.archive)
    if arguments.summarise:
        rows = read(sweep)
        (arguments.results / "lr_over_depth.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        (arguments.results / "lr_over_depth.md").write_text(as_table(rows))
        as_picture(rows).save(arguments.results / "lr_over_depth.svg")
    return code


if __name__ == "__main__":
    sys.exit(main())
