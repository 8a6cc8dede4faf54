r"""Run the plans that docs/evidence.md rests on, in stretches, and publish their results.

    python benchmarks/evidence.py                                            # what is left of each question
    python benchmarks/evidence.py --run cifar10.npz --budget 540 --archive OUT/evidence.tar.gz
    python benchmarks/evidence.py --run cifar10.npz --budget 540 --begin BACK/evidence.tar.gz --archive OUT/more.tar.gz
    python benchmarks/evidence.py --publish --begin BACK/more.tar.gz         # into results/compare/
    python website/generate.py                                               # tables and figures of the pages

A stretch begins with what is published, or with the archive of an earlier one, and takes the questions in order of
worth. It can be killed at any time: every 20 seconds the ended runs go into the archive. On a GPU four runs share it
under NVIDIA's MPS.
"""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from comparison_archive import RUN_FOLDERS, UNFINISHED, cells_of, exit_code, has_ended, run_packing, unpack
from fathoms.cli.flags.plan_flags import read_plan_file
from fathoms.comparing.plan import Plan
from fathoms.machine import visible_gpus
from mps import mps

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "results" / "compare"
QUESTIONS = (
    "scaler_depth36",
    "norms_depth12",
    "stem_norms",
    "residual_depth48",
    "residual_depth12",
    "cait_parts",
    "placements",
    "norm_by_optimizer",
    "new_parts",
    "speed_90",
    "speed_94",
)
"""Plans on CIFAR-10 and one GPU, in order of worth."""
LEAN = ("--eval-interval", "10", "--keep", "none", "--probe-interval", "0")
PER_GPU = 4
# Seconds that are too few to begin a comparison in.
LEAST = 15.0

WRITTEN = (
    "plan.json",
    "results.json",
    "results.csv",
    "table.md",
    "timings.json",
    "tuning.json",
    "split.json",
)
"""Files of a comparison that are published."""
OF_A_RUN = ("summary.json", "correct.bits", "metrics.jsonl")
"""Files of a run that its comparison goes on from: status and score, a bit for each image, curves."""


def publish(folder: Path, target: Path) -> None:
    """Copy what tables, figures and the same command on another machine need of a comparison."""
    target.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    for kind in RUN_FOLDERS:
        for run in sorted(folder.glob(f"{kind}/*")):
            if has_ended(run):
                (target / kind / run.name).mkdir(parents=True, exist_ok=True)
                for name in OF_A_RUN:
                    if (run / name).is_file():
                        shutil.copyfile(run / name, target / kind / run.name / name)


def planned(path: Path) -> tuple[int, int]:
    """Runs and trials of tuning that a plan file asks for."""
    plan = Plan.from_dict(read_plan_file(str(path)).plan, str(path))
    arms, tries = len(plan.variants()), math.prod(map(len, plan.tune.values()))
    return arms * plan.seeds, arms * tries if plan.tune else 0


def left(name: str, plans: Path, output: Path) -> str:
    """How much of a question has ended, in words."""
    runs, trials = planned(plans / f"{name}.toml")
    tried = sum(has_ended(run) for run in output.glob(f"{name}/tuning/*"))
    done = sum(has_ended(run) for run in output.glob(f"{name}/cells/*"))
    tuned = f"{tried} of {trials} trials, " if trials else ""
    return f"{name}: {tuned}{done} of {runs} runs"


@dataclass
class Stretch:
    """The questions one after the other, until all are answered or the time is used up.

    Args:
        data: The data, as for `fathoms compare`; None for the digits.
        plans: Folder of the plan files.
        output: Folder of the comparisons.
        published: Folder of the published ones, with which those that have not begun begin.
        more: Flags for all runs.
    """

    data: str | None
    plans: Path
    output: Path
    published: Path
    more: Sequence[str] = ()
    stopped: bool = False
    running: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)

    def run(self, names: Sequence[str], budget: float | None, archive: Path | None) -> int:
        """Run what is missing and keep what has ended; 0, 75 where runs are left, or the first other code."""
        run_packing([functools.partial(self._all, names, budget)], self._stop, self.output, archive)
        return exit_code(self.codes)

    def _all(self, names: Sequence[str], budget: float | None) -> None:
        end = None if budget is None else time.monotonic() + budget
        for name in names:
            seconds = None if end is None else end - time.monotonic()
            if self.stopped or (seconds is not None and seconds < LEAST):
                self.codes.append(UNFINISHED)
                return
            if not (self.output / name).exists() and (self.published / name).is_dir():
                publish(self.published / name, self.output / name)
            log = self.output / f"{name}.log"
            with log.open("ab") as file:
                command = [sys.executable, "-m", *self.command(name, seconds)]
                self.running = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
                self.codes.append(self.running.wait())
            print(f"{left(name, self.plans, self.output)}, exit {self.codes[-1]}", flush=True)
            if self.codes[-1] not in (0, UNFINISHED):
                print("\n".join(log.read_text(errors="replace").splitlines()[-4:]), flush=True)

    def command(self, name: str, seconds: float | None) -> list[str]:
        """The comparison of one question."""
        data = [] if self.data is None else [self.data]
        limit = [] if seconds is None else ["--budget", f"{int(seconds)}s"]
        where = ["--output", str(self.output), "--experiment", name]
        plan = ["--plan", str(self.plans / f"{name}.toml")]
        return ["fathoms", "compare", *data, *plan, *LEAN, *self.more, *where, *limit]

    def _stop(self) -> None:
        """Pass a signal on: the comparison saves and ends."""
        self.stopped = True
        if self.running is not None and self.running.poll() is None:
            self.running.terminate()


def main() -> int:
    """Show, run or publish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", help="CIFAR-10, as for fathoms compare; default: the digits")
    parser.add_argument(
        "--only", nargs="+", default=QUESTIONS, metavar="NAME", help="questions, by their plans"
    )
    parser.add_argument("--run", action="store_true", help="run what is left")
    parser.add_argument("--budget", type=float, help="seconds after which to stop; the same command goes on")
    parser.add_argument("--archive", type=Path, help="file that the ended runs are put into as they end")
    parser.add_argument("--begin", type=Path, help="such a file, of an earlier stretch")
    parser.add_argument(
        "--publish", action="store_true", help="copy what has ended into the published results"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/evidence"), help="folder of the comparisons"
    )
    parser.add_argument("--plans", type=Path, default=ROOT / "plans", help="folder of the plan files")
    parser.add_argument("--results", type=Path, default=PUBLISHED, help="folder of the published results")
    parser.add_argument("--per-gpu", type=int, default=PER_GPU, help="runs that share a GPU")
    arguments = parser.parse_args()
    code, names = 0, arguments.only
    if arguments.run or arguments.publish:
        unpack(arguments.begin, arguments.output)
    else:
        print("\n".join(left(name, arguments.plans, arguments.results) for name in names))
    if arguments.run:
        more = ["--per-gpu", str(arguments.per_gpu)] if visible_gpus("auto") else []
        stretch = Stretch(arguments.data, arguments.plans, arguments.output, arguments.results, more)
        with tempfile.TemporaryDirectory() as scratch:
            sharing = mps(Path(scratch) / "mps") if more and arguments.per_gpu > 1 else nullcontext(True)
            with sharing as shared:
                if not shared:
                    print("NVIDIA's MPS does not run here: the runs take turns on the GPU", flush=True)
                code = stretch.run(names, arguments.budget, arguments.archive)
    if arguments.publish:
        for name in names:
            if cells_of(arguments.output / name):
                publish(arguments.output / name, arguments.results / name)
                print(f"published: {left(name, arguments.plans, arguments.results)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
