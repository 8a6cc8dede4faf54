"""One command's work on a comparison: tuning trials, then cells, on workers; results after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.compare.cells import Cell
from fathoms.compare.folder import stale
from fathoms.compare.progress import Progress, Show
from fathoms.compare.results import gather, judged, write_results
from fathoms.compare.slurm.submit import Submission
from fathoms.compare.slurm.task import Task
from fathoms.compare.tuning import choose, chosen_before, tuning_file, tuning_lines
from fathoms.compare.workers.runner import Runner, order
from fathoms.compare.workers.signals import PassSignals

if TYPE_CHECKING:
    from fathoms.compare.comparison import Comparison

UNFINISHED = 75
"""Exit code where the time is used up and cells are left: give the same command again."""


class Session:
    """Runs the missing cells of a comparison whose folder is held.

    Args:
        comparison: What is compared, and how.
        plan: The plan, as plan.json holds it.
        say: Takes a line for the user.
        show: Takes the rows of a live table; None prints lines instead.
    """

    def __init__(
        self,
        comparison: Comparison,
        plan: Mapping[str, Any],
        say: Callable[[str], None],
        show: Show | None = None,
    ) -> None:
        self.comparison, self.plan = comparison, plan
        self.folder, self.options = comparison.folder, comparison.options
        self.trials = comparison.trials()
        self.cells = comparison.cells()
        self.tuned: list[dict[str, Any]] = []
        self.progress = Progress(self.folder, 0, self.options.keep, say, self._answer, show)
        seconds = self.options.seconds
        deadline = None if seconds is None else time.monotonic() + seconds
        self.runner: Runner | Submission
        if self.options.slurm is not None:
            task = Task(str(self.folder.path), self.options.keep, self.options.jobs, self.options.per_gpu)
            self.runner = Submission(self.folder, self.options.slurm, task, say)
        else:
            self.runner = Runner(comparison.slots(), self.folder.path / "logs", self.progress, deadline)

    def run(self) -> tuple[dict[str, Any], int]:
        """The results and the exit code."""
        tried = [trial.cell for trial in self.trials]
        try:
            with PassSignals(self.runner) as signals:
                self._tune()
                self._try(tried)
                if self._tune():
                    for line in tuning_lines(self.tuned):
                        self.progress.say(line)
                    self._work(self.cells)
                elif not self.runner.stopping.is_set():
                    whose = "" if self.options.shard == (1, 1) else " of other shards"
                    self.progress.say(f"trials{whose} are missing: the runs follow once they are there")
        finally:
            self.progress.close()
        results = self.refresh()
        with self.folder.writing():
            self.folder.write("timings.json", self.progress.timings([*tried, *self.cells]))
        return results, self._exit_code(tried, signals)

    def refresh(self) -> dict[str, Any]:
        """Gather and judge what is there, and write it."""
        # Else the results of a shard that gathered earlier could replace those of one that wrote meanwhile.
        with self.folder.writing():
            results = judged(gather(self.cells, self.folder, self.plan), self.plan, self.folder.path)
            if self.tuned:
                results["tuning"] = [
                    {key: arm[key] for key in ("name", "best", "edge", "failed")} for arm in self.tuned
                ]
            write_results(self.folder, results)
        return results

    def _answer(self) -> str:
        """The answer so far; none while values are still tried, which are not runs of the comparison."""
        answer = str(self.refresh()["answer"])
        return answer if self.tuned or not self.trials else ""

    def _try(self, tried: Sequence[Cell]) -> None:
        """Run the trials that are missing, but none of an arm whose values are settled."""
        settled = {arm["name"] for arm in self._settled()}
        kept = {trial.cell.folder for trial in self.trials if trial.arm in settled}
        if any(cell.folder in kept for cell in stale(tried, self.folder)):
            self.progress.say(
                "runs have ended, so their scores are known: what was chosen stays, "
                "and trials that failed are not tried again"
            )
        self._work(tried, more=len(self.cells), kept=kept)

    def _settled(self) -> list[dict[str, Any]]:
        """The arms of tuning.json once a run of the comparison has ended.

        Another choice then would follow the scores on test, and throw finished runs away.
        """
        arms = [arm for arm in chosen_before(self.folder) if arm["name"] in self.comparison.arms]
        chosen = {arm["name"]: arm["best"] for arm in arms}
        if not chosen:
            return []
        cells = [cell for cell in self.comparison.cells(chosen) if cell.arm in chosen]
        return arms if len(stale(cells, self.folder)) < len(cells) else []

    def _work(self, cells: Sequence[Cell], more: int = 0, kept: Collection[Path] = ()) -> None:
        """Run the cells of this shard that are missing, but for those in `kept`; `more` are to follow."""
        if not cells:
            return
        missing = stale(cells, self.folder)
        if len(cells) > len(missing):
            self.progress.say(f"{len(cells) - len(missing)} of {len(cells)} runs are there already")
            if self.plan["keep"] == self.options.keep:
                # A comparison that was killed may not have come to it.
                for cell in set_apart(cells, missing):
                    self.folder.prune(cell, self.options.keep)
        ours = [cell for cell in self._share(missing, cells) if cell.folder not in kept]
        self.progress.total = self.progress.ended_cells + len(ours) + more
        if not self.runner.stopping.is_set():
            self.runner.run(order(ours, len(self.comparison.gpus)))

    def _share(self, missing: Sequence[Cell], cells: Sequence[Cell]) -> list[Cell]:
        """The missing cells of this shard, which is the same share of all cells whatever is missing."""
        share, shares = self.options.shard
        own = {cell.folder for cell in cells[share - 1 :: shares]}
        return [cell for cell in missing if cell.folder in own]

    def _tune(self) -> bool:
        """Choose each arm's values once all trials ended or failed; whether that is so."""
        tuning, metric = self.comparison.tuning, self.options.metric
        if tuning is None:
            return True
        settled = {arm["name"]: arm for arm in self._settled()}
        open_ = [trial for trial in self.trials if trial.arm not in settled]
        if any(not self.folder.status(trial.cell) for trial in open_):
            return False
        found = settled | {arm["name"]: arm for arm in choose(open_, self.folder, metric)}
        self.tuned = [found[name] for name in self.comparison.arms]
        self.folder.write("tuning.json", tuning_file(self.tuned, tuning, metric))
        self.cells = self.comparison.cells({arm["name"]: arm["best"] for arm in self.tuned})
        return True

    def _exit_code(self, tried: Sequence[Cell], signals: Sequence[int]) -> int:
        """0 once every cell of this shard ended, 1 if one failed, 75 if cells are left."""
        if signals:
            return 128 + signals[0]
        left = [*self._share(stale(tried, self.folder), tried)]
        left += self._share(stale(self.cells, self.folder), self.cells)
        failed = [cell for cell in left if self.folder.status(cell).get("status") == "failed"]
        settled = {arm["name"] for arm in self._settled()}
        gone = {trial.cell.folder for trial in self.trials if trial.arm in settled}
        waiting = [cell for cell in left if cell not in failed and cell.folder not in gone]
        return UNFINISHED if waiting else 1 if failed else 0


def set_apart(cells: Sequence[Cell], missing: Sequence[Cell]) -> list[Cell]:
    """The cells that are not missing."""
    left = {cell.folder for cell in missing}
    return [cell for cell in cells if cell.folder not in left]
