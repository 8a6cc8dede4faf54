"""Scores of runs that were trained elsewhere, judged as those of a comparison are."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.comparing.answer import answer
from fathoms.comparing.arms import Arm, Metric
from fathoms.comparing.statistics import mean_interval, pooled_sd
from fathoms.comparing.verdicts import Rules, Verdict, winner
from fathoms.comparing.verdicts import judge as verdicts_of
from fathoms.errors import ConfigError
from fathoms.registry import check_name
from fathoms.text_table import aligned, as_html, plural
from fathoms.untrusted import has_control, read_plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BYTES = 1 << 26
MOST_ARMS = 200
LEAST, MOST = 1e-60, 1e60
"""Between them, the squares of variances and of their sums are numbers above zero."""
STATUSES = ("done", "diverged", "failed")
OTHERS = {
    **dict.fromkeys(("finished", "completed", "complete", "succeeded"), "done"),
    **dict.fromkeys(("killed", "crashed", "fail", "cancelled", "canceled"), "failed"),
}
"""Status words of MLflow, Weights & Biases, Optuna and Slurm."""
COLUMNS = ("arm", "seed", "score", "status")
Run = tuple[Any, Any, Any, Any]
"""Arm, seed, score and status, as they were given."""


@dataclass(frozen=True)
class Judgement:
    """What scores support: `verdicts` of all pairs, the `answer` in a sentence, `table()`, `plot()`.

    Args:
        arms: The scores of each arm.
        verdicts: One for each pair.
        answer: Who wins, or that nobody does.
        rules: How they were compared.
    """

    arms: tuple[Arm, ...]
    verdicts: tuple[Verdict, ...]
    answer: str
    rules: Rules

    @property
    def best(self) -> str | None:
        """The arm that is better than every other; None where none is."""
        return winner([arm.name for arm in self.arms], self.verdicts)

    def table(self) -> str:
        """Arms with their means and intervals, then a sentence for each pair."""
        amount = f".{self.rules.metric.digits}f"
        rows = []
        for arm in self.arms:
            side = mean_interval(arm.values)
            interval = "" if side is None else f"{side[0]:{amount}} to {side[1]:{amount}}"
            mean = f"{arm.mean():{amount}}" if arm.scores else ""
            lost = [
                f"{len(seeds)} {word}"
                for word, seeds in (("diverged", arm.diverged), ("failed", arm.failed))
                if seeds
            ]
            rows.append((arm.name, str(len(arm.scores)), mean, interval, ", ".join(lost)))
        head = ("arm", "seeds", f"mean {self.rules.metric.name}", "95 % interval", "")
        return "\n".join([aligned(head, rows), "", *(verdict.sentence for verdict in self.verdicts)])

    def to_json(self) -> dict[str, Any]:
        arms = [
            {
                "name": arm.name,
                "scores": [{"seed": seed, "score": score} for seed, score in arm.scores],
                "diverged": list(arm.diverged),
                "failed": list(arm.failed),
            }
            for arm in self.arms
        ]
        verdicts = [verdict.to_json() for verdict in self.verdicts]
        return {"answer": self.answer, "margin": self.rules.margin, "arms": arms, "verdicts": verdicts}

    def plot(self) -> Figure:
        from fathoms.plotting.panels import Interval, interval_rows

        rows, amount = [], f".{self.rules.metric.digits}f"
        for index, arm in enumerate(arm for arm in self.arms if arm.scores):
            mean, side = arm.mean(), mean_interval(arm.values)
            text = f"{mean:{amount}}" + (
                "" if side is None else f" ({side[0]:{amount}} to {side[1]:{amount}})"
            )
            rows.append(Interval(arm.name, index, mean, side, arm.values, text, ""))
        return interval_rows(rows, f"{self.rules.metric.name}, by seed", "mean and its 95 % interval")

    def __repr__(self) -> str:
        return f"{self.answer}\n\n{self.table()}"

    def _repr_html_(self) -> str:
        return as_html(self.answer, self.table())


def judge(
    scores: Any,
    *,
    baseline: str | None = None,
    smallest_difference: float | None = None,
    higher_is_better: bool = True,
    paired: bool = False,
    name: str = "score",
) -> Judgement:
    """Say which arms differ, from their scores over seeds, with the tests of `fathoms compare`.

    Welch's test for every pair, or of each arm against the baseline, corrected by Holm; equivalence within the
    smallest difference that matters; how many more seeds an undecided pair needs.

    Args:
        scores: By the name of its arm, a list of scores, or scores by seed; or a DataFrame, rows, or the path of a
            CSV file with the columns arm, seed, score and, if there are any, status: done, diverged or failed, or
            such words of trackers as FINISHED and KILLED. A score that is not finite is a run that diverged.
        baseline: The arm that the others are compared with; None compares all pairs.
        smallest_difference: What matters; None takes the standard deviation over seeds.
        higher_is_better: False for a loss.
        paired: Whether runs of one seed belong together.
        name: What the scores are.

    >>> found = judge({"layernorm": [71.2, 71.9, 71.5], "dyt": [64.8, 65.3, 64.1]}, smallest_difference=0.5)
    >>> found.best
    'layernorm'
    """
    for flag, value in (("higher_is_better", higher_is_better), ("paired", paired)):
        if not isinstance(value, bool):
            raise ConfigError(f"{flag}={value!r}: give True or False")
    arms = _arms(_rows(scores))
    if len(arms) > MOST_ARMS:
        raise ConfigError(f"scores: {len(arms)} arms are more than {MOST_ARMS}; compare fewer")
    if baseline is not None:
        check_name(baseline, [arm.name for arm in arms], "arm", "baseline")
    given = smallest_difference
    # An int may be too large for a float, and numpy's float32 too small for the limits.
    size = given if isinstance(given, int) else float(given) if isinstance(given, Real) else math.nan
    if given is not None and not LEAST <= size <= MOST:
        raise ConfigError(
            f"smallest_difference={given!r}: give a number above 0, from {LEAST:g} to {MOST:g}, or None"
        )
    margin = _spread(arms) if given is None else float(size)
    values = [score for arm in arms for score in arm.values]
    worst = (min if higher_is_better else max)(values, default=0.0)
    digits = max(0, 1 - math.floor(math.log10(margin)))
    metric = Metric(name, "", 1 if higher_is_better else -1, worst, decimals=digits)
    rules = Rules(metric, margin, baseline, paired)
    verdicts = verdicts_of(arms, rules)
    if (finer := _digits(verdicts, max(map(abs, values), default=0.0))) > digits:
        rules = replace(rules, metric=replace(metric, decimals=finer))
        verdicts = verdicts_of(arms, rules)
    return Judgement(tuple(arms), tuple(verdicts), answer(arms, verdicts, rules), rules)


def _digits(verdicts: Sequence[Verdict], largest: float) -> int:
    """Decimals that show half of every interval, and so every difference that is told apart, with two digits."""
    sizes = [
        (verdict.high - verdict.low) / 2 if math.isfinite(verdict.low) else abs(verdict.difference)
        for verdict in verdicts
    ]
    # What is smaller comes from rounding.
    sizes = [size for size in sizes if size > 1e-15 * largest]
    return 1 - math.floor(math.log10(min(sizes))) if sizes else 0


def _spread(arms: Sequence[Arm]) -> float:
    """The standard deviation over seeds, pooled over arms; where there is none, a hundredth of the mean."""
    several = [arm.values for arm in arms if len(arm.scores) > 1]
    sd = pooled_sd(several)[0] if several else 0.0
    sd = sd or abs(statistics.fmean([v for arm in arms for v in arm.values] or [1.0])) / 100 or 1.0
    return float(f"{sd:.2g}")


def _rows(scores: Any) -> Iterable[Run]:
    """Arm, seed, score and status of every run, whatever they came in."""
    if isinstance(scores, str | Path):
        return _csv_rows(Path(scores))
    if hasattr(scores, "to_dict") and hasattr(scores, "columns"):
        _check_columns(list(map(str, scores.columns)), "scores")
        scores = scores.to_dict("records")
    if isinstance(scores, Mapping):
        if {"arm", "score"} <= scores.keys() <= set(COLUMNS):
            raise ConfigError(
                "scores: these are columns; give a DataFrame of them, or lists of scores by arm"
            )
        rows: list[Run] = []
        for arm, values in scores.items():
            if isinstance(values, str | bytes | Set) or not hasattr(values, "__iter__"):
                raise ConfigError(f"scores: {arm!r} has {values!r}; give a list of scores, one for each seed")
            # A Series of pandas has its seeds as its index.
            by_seed = values.items() if hasattr(values, "items") else enumerate(values)
            before = len(rows)
            rows += [(arm, seed, value, None) for seed, value in by_seed]
            if len(rows) == before:
                raise ConfigError(f"scores: {arm!r} has no score; give it one, or leave it out")
        return rows
    if isinstance(scores, Sequence):
        return [_row(row, f"scores: row {place}") for place, row in enumerate(scores, 1)]
    raise ConfigError("scores: give lists by arm, rows of (arm, seed, score), a DataFrame, or a CSV file")


def _row(row: Any, where: str) -> Run:
    if isinstance(row, Mapping):
        for key in COLUMNS[:3]:
            if key not in row:
                raise ConfigError(f"{where}: has no {key}; the columns are {', '.join(COLUMNS)}")
        return row["arm"], row["seed"], row["score"], row.get("status")
    if isinstance(row, Sequence) and not isinstance(row, str) and len(row) in (3, 4):
        return row[0], row[1], row[2], row[3] if len(row) > 3 else None
    raise ConfigError(f"{where}: {row!r} is no run; give (arm, seed, score) or (arm, seed, score, status)")


def _csv_rows(path: Path) -> list[Run]:
    try:
        text = read_plain(path, MOST_BYTES).decode("utf-8-sig")
        # Lines may end in CR alone.
        reader = csv.reader(io.StringIO(text, newline=None), strict=True)
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV ({error}); give a UTF-8 text file") from error
    names = [cell.lower() for cell in lines[0][1]] if lines else []
    _check_columns(names, str(path))
    for key in COLUMNS[:3]:
        if key not in names:
            raise ConfigError(f"{path}: has no column {key!r}; the columns are {', '.join(COLUMNS)}")
    for place, cells in lines[1:]:
        if len(cells) != len(names):
            counts = f"{plural(len(cells), 'cell')} for {len(names)} columns"
            raise ConfigError(f"{path}: line {place} has {counts}; give each column one")
    return [_row(dict(zip(names, cells, strict=True)), f"{path}: line {place}") for place, cells in lines[1:]]


def _check_columns(names: Sequence[str], where: str) -> None:
    """Refuse a name that two columns have."""
    seen: set[str] = set()
    for name in filter(None, names):
        if name in seen:
            raise ConfigError(f"{where}: column {name!r} is there twice; leave one out")
        seen.add(name)


def _arms(rows: Iterable[Run]) -> list[Arm]:
    """The arms in the order of their first rows, each with its runs in the order of seeds."""
    found: dict[str, dict[int, tuple[float, str]]] = {}
    for place, (arm, seed, score, status) in enumerate(rows, 1):
        where = f"scores: run {place}"
        name = "" if _is_missing(arm) else str(arm).strip()
        if has_control(name) or not name:
            raise ConfigError(f"{where}: {arm!r} is no name of an arm; give each run one")
        word = "done" if _is_missing(status) else str(status).strip().lower()
        word = check_name(OTHERS.get(word, word), STATUSES, "status", where)
        number, value = _seed(seed, where), _score(score, word, where)
        if number in found.setdefault(name, {}):
            raise ConfigError(f"{where}: seed {number} of {name!r} is there twice; leave one out")
        found[name][number] = (value, "diverged" if word == "done" and not math.isfinite(value) else word)
    if not found:
        raise ConfigError("scores: there are no runs; give at least one")
    arms = []
    for arm, runs in found.items():
        by_word = {word: tuple(seed for seed in sorted(runs) if runs[seed][1] == word) for word in STATUSES}
        done = tuple((seed, runs[seed][0]) for seed in by_word["done"])
        arms.append(Arm(arm, done, by_word["diverged"], by_word["failed"]))
    return arms


def _is_missing(value: Any) -> bool:
    """Whether it is None, blank, or the NaN, NaT or NA of a DataFrame."""
    try:
        return value is None or bool(value != value) or (isinstance(value, str) and not value.strip())
    except (TypeError, ValueError):
        # Whether NA is equal to itself has no answer.
        return True


def _seed(value: Any, where: str) -> int:
    try:
        number = int(value)
        if number == float(value) and 0 <= number < 2**63:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{where}: seed {value!r} is not a whole number from 0")


def _score(value: Any, status: str, where: str) -> float:
    if status != "done" and _is_missing(value):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: score {value!r} is not a number") from None
    if MOST < abs(number) < math.inf:
        raise ConfigError(f"{where}: score {value!r} is beyond {MOST:g}; call the run diverged, or rescale")
    if 0 < abs(number) < LEAST:
        raise ConfigError(f"{where}: score {value!r} is below {LEAST:g}; give 0, or rescale")
    return number
