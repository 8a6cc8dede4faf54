"""Figures of runs and of comparisons: each function takes what the page shows and returns a matplotlib figure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fathoms.errors import ConfigError
from fathoms.files import write_atomic
from fathoms.plotting.panels import (
    Interval,
    Line,
    NumberMap,
    Panel,
    Points,
    interval_rows,
    line_panels,
    map_grid,
    point_panel,
)
from fathoms.plotting.style import to_svg
from fathoms.report.arm_views import (
    CURVES,
    ArmView,
    arm_lines,
    arms_of,
    best_first,
    diverged,
    epoch_grid,
    leading,
    trials_of,
    tuned_arms,
)
from fathoms.report.records import DIGITS, CellRecord, ComparisonRecord, clipped, listed, number, score, table
from fathoms.untrusted import Row, read_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORMS = {
    "gradient": "Gradient on the stream",
    "stream": "Activations of the stream",
    "ratio": "Branch over stream",
    "weights": "Gradient of the weights",
}
"""Numbers of a site of probe.jsonl that are shown over depth and time."""
MOST_COLUMNS = 60
"""Measurements that a map shows; more are subsampled evenly."""


class Curves(NamedTuple):
    """One chart of a run: its lines by name; `floor` is a height that the axis goes down to."""

    title: str
    unit: str
    lines: Mapping[str, Points]
    floor: float | None = None


def run_figure(charts: Mapping[str, Sequence[Curves]], title: str) -> Figure:
    """The curves of a run by epoch and by update, as its page shows them.

    Args:
        charts: Charts by what their horizontal axis counts.
        title: Above them.
    """
    order = list(dict.fromkeys(name for own in charts.values() for one in own for name in one.lines))
    panels = [
        Panel(
            f"{one.title}, {one.unit}" if one.unit else one.title,
            across,
            [Line(name, points, order.index(name)) for name, points in one.lines.items()],
        )
        for across, own in charts.items()
        for one in own
    ]
    return line_panels(panels, title)


def norm_map(title: str, rows: Sequence[Row], field: str) -> NumberMap | None:
    """One number of every site of a probe.jsonl over the updates; None where it was never above zero."""
    rows = [row for row in rows if isinstance(row.get("sites"), list) and row["sites"]]
    if len(rows) > MOST_COLUMNS:
        rows = [rows[round(i * (len(rows) - 1) / (MOST_COLUMNS - 1))] for i in range(MOST_COLUMNS)]
    if not rows:
        return None
    names = [_site_name(table(site)) for site in rows[0]["sites"]]
    values = np.full((len(names), len(rows)), np.nan)
    for column, row in enumerate(rows):
        for place, site in enumerate(row["sites"][: len(names)]):
            values[place, column] = number(table(site).get(field), np.nan)
    values[~(values > 1e-300)] = np.nan
    updates = [f"{number(row.get('step'), 0.0):g}" for row in rows]
    return NumberMap(title, values, names, updates) if np.isfinite(values).any() else None


def _site_name(site: Mapping[str, Any]) -> str:
    block = str(site.get("block", "?")).removeprefix("blocks.")
    return f"{clipped(block, 24)} {clipped(str(site.get('branch', '?')), 12)}"


def norms_figure(
    maps: Sequence[NumberMap], title: str = "", columns: int = 1, width: float = 300.0
) -> Figure:
    """Maps of one number over depth and time, on one logarithmic colour scale."""
    height = 18.0 * max(len(one.rows) for one in maps) + 60
    return map_grid(maps, title, columns, size=(width, min(height, 500.0)), log=True, labels=("update", ""))


MOST_ROWS = 60
"""Arms or pairs that are drawn; a picture of a thousand is not read."""
MOST_AXES, MOST_MAPPED, BEST = 6, 12, 8
"""Axes of a comparison that are crossed, arms whose norms are mapped, and arms whose curves are drawn."""
FOLDER = "figures"
OURS = re.compile(
    r"(scores|differences|tuning|curves-(val|train)-(top1|loss)|axes-\d+-[\w-]+"
    r"|cost-(training-time|peak-memory|images-per-second))\.svg",
    re.ASCII,
)
"""Names of the figures that `figures` makes."""


def figures(comparison: ComparisonRecord) -> dict[str, Figure]:
    """Every figure that there are numbers for, by the name of its file without the ending."""
    arms, metric = arms_of(comparison), comparison.metric
    made: dict[str, Figure | None] = {
        "scores": scores_figure(arms, comparison),
        "differences": differences_figure(arms, comparison),
    }
    for split, field, title, unit in CURVES:
        made[f"curves-{split}-{field}"] = curves_figure(
            arms, split, field, f"{title}, {unit}" if unit else title
        )
    made["tuning"] = tuning_figure(arms, comparison)
    made |= {f"cost-{_plain(name)}": figure for name, figure in cost_figures(arms, metric).items()}
    for place, (down, across) in enumerate(axis_pairs(arms), start=1):
        made[f"axes-{place}-{_plain(down)}-{_plain(across)}"] = axes_figure(arms, metric, down, across)
    return {name: figure for name, figure in made.items() if figure is not None}


def write_figures(folder: Path, drawn: Mapping[str, Figure]) -> None:
    """Write the figures into `figures/`; those of an earlier time that no longer apply go, other files stay."""
    target = folder / FOLDER
    made = {f"{name}.svg": to_svg(figure) for name, figure in drawn.items()}
    if target.is_symlink():
        return
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        if OURS.fullmatch(old.name) and old.name not in made and not old.is_dir():
            old.unlink()
    for name, text in made.items():
        write_atomic(target / name, text.encode(errors="replace"))
    if not any(target.iterdir()):
        target.rmdir()


def _plain(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")[:40] or "axis"


def measure(metric: str) -> str:
    return {"top1": "Accuracy, %", "loss": "Loss", "seconds": "Seconds to the accuracy"}[metric]


def scores_figure(
    arms: Sequence[ArmView], comparison: ComparisonRecord, narrow: bool = False
) -> Figure | None:
    """Scores of every seed with the mean and its 95 % interval, the best arm first, and the difference to it beside.

    None before a score.
    """
    metric, values = comparison.metric, [value for arm in arms for value in arm.scores]
    if not values:
        return None
    # One noisy arm must not squeeze all others: intervals may widen the scale by no more than its own width.
    room = max(values) - min(values)
    if room < 10.0 ** -DIGITS[metric]:
        # Equal scores: the scale is that of the intervals.
        room = max([1.0, *(arm.interval[1] - arm.interval[0] for arm in arms if arm.interval is not None)])
    low, high = min(values) - room, max(values) + room
    low, high = (max(low, 0.0), min(high, 100.0)) if metric == "top1" else (low, high)
    best, rows = leading(arms, comparison), []
    for arm in sorted(best_first(arms), key=lambda arm: arm is not best)[:MOST_ROWS]:
        words = [against(arm, best, comparison)] if best is not None and len(arms) > 1 else []
        words += [
            f"{arm.having(word)} {word}" for word in ("diverged", "failed", "stalled") if arm.having(word)
        ]
        side = None if arm.interval is None else (max(arm.interval[0], low), min(arm.interval[1], high))
        text, remark = score(arm.mean, metric), ", ".join(filter(None, words))
        rows.append(Interval(arm.label, arm.index, arm.mean, side, arm.scores, text, remark))
    title, note = (
        f"{measure(metric)}, by seed",
        "beside: the mean, its difference to the best and the verdict",
    )
    if not narrow:
        title += ", with the mean and its 95 % interval"
    return interval_rows(
        rows, title, "above: " + note.removeprefix("beside: ") if narrow else note, narrow=narrow
    )


def against(arm: ArmView, best: ArmView, comparison: ComparisonRecord) -> str:
    """The difference of an arm to the best one, or to a baseline, its interval and the verdict, on one line."""
    rows = [table(row) for row in listed(comparison.results.get("verdicts"))]
    own = [row for row in rows if arm.name in (row.get("a"), row.get("b"))]
    found = next((row for row in own if {row.get("a"), row.get("b")} == {arm.name, best.name}), None)
    if arm is best or (found is None and (len(own) != 1 or comparison.plan.get("baseline") is None)):
        return "best mean" if arm is best else "untested"
    row = found or own[0]
    flip = row.get("b") == arm.name
    word = str(row.get("verdict"))
    if word.endswith("better"):
        word = "worse" if (word[0] == "a") == flip else "better"
    if found is None:
        word += (
            f" than {row.get('a' if flip else 'b')}" if word in ("better", "worse") else ", to the baseline"
        )
    sides = _sides(row, flip)
    if sides is None:
        return clipped(word, 44)
    gap, metric = number(row.get("difference"), 0.0) * (-1 if flip else 1), comparison.metric
    between = f"({_signed(sides[0], metric)} to {_signed(sides[1], metric)})"
    return f"{_signed(gap, metric)} {between}   {clipped(word, 44)}"


def differences_figure(
    arms: Sequence[ArmView], comparison: ComparisonRecord, narrow: bool = False
) -> Figure | None:
    """The corrected interval of every pair that was tested, the better first, largest first; None without verdicts."""
    metric = comparison.metric
    labels = {arm.name: arm.label for arm in arms}
    tested = [row for row in map(table, listed(comparison.results.get("verdicts"))) if _sides(row)]
    if not tested:
        return None
    tested.sort(key=lambda row: -abs(number(row.get("difference"), 0.0)))
    rows = []
    for row in tested[:MOST_ROWS]:
        difference = number(row.get("difference"), 0.0)
        flip = difference < 0 if metric == "top1" else difference > 0
        names = [
            labels.get(str(row.get(key)), clipped(str(row.get(key)))) for key in ("ba" if flip else "ab")
        ]
        side = _sides(row, flip) or (0.0, 0.0)
        sure = str(row.get("verdict")).endswith("better")
        remark = "the first is better" if sure else str(row.get("verdict"))
        remark += "" if (p := number(row.get("p"))) is None else f", p = {p:.2g}"
        if (ahead := number(row.get("win_share"))) is not None:
            remark += f", ahead in {1 - ahead if flip else ahead:.0%} of pairs of runs"
        middle = -difference if flip else difference
        text = f"{_signed(middle, metric)} ({_signed(side[0], metric)} to {_signed(side[1], metric)})"
        rows.append(
            Interval(
                f"{names[0]} − {names[1]}", None if sure else -1, middle, side, [], text, clipped(remark)
            )
        )
    unit = {"top1": "points"}.get(metric, metric)
    margin = number(comparison.results.get("margin"), 0.0)
    title = f"Differences, {unit}, with their corrected intervals"
    note = f"shaded: ±{score(margin, metric)}, the smallest difference that matters" if margin else ""
    return interval_rows(rows, title, note, band=(-margin, margin), narrow=narrow)


def _sides(row: Mapping[str, Any], flip: bool = False) -> tuple[float, float] | None:
    """The corrected interval of a verdict, turned round where `flip`; None where there is none."""
    low, high = number(row.get("low")), number(row.get("high"))
    return None if low is None or high is None else (-high, -low) if flip else (low, high)


def _signed(value: float, metric: str) -> str:
    return f"{value:+.{DIGITS[metric]}f}".replace("-", "−")


def curves_figure(arms: Sequence[ArmView], split: str, field: str, title: str) -> Figure | None:
    """The mean over seeds by epoch with a band from the lowest to the highest, of the best arms."""
    grid = epoch_grid(arms)
    lines = []
    for arm in best_first(arms)[:BEST]:
        if not (found := arm_lines(arm, split, field, grid)):
            continue
        stacked = np.stack(found).astype(float)
        known = ~np.isnan(stacked).all(axis=0)
        xs, values = grid[known], stacked[:, known]
        low, mean, high = (reduce(values, axis=0) for reduce in (np.nanmin, np.nanmean, np.nanmax))
        points = list(zip(xs.tolist(), mean.tolist(), strict=True))
        lines.append(Line(arm.label, points, arm.index, arm.index // 7, band=(low.tolist(), high.tolist())))
    return line_panels([Panel(title, "epoch", lines)], "", 1, size=(640, 330)) if lines else None


def tuning_figure(arms: Sequence[ArmView], comparison: ComparisonRecord) -> Figure | None:
    """Mean score on val by the tuned value, a line an arm; None where no or more than one option is tuned."""
    grid, found, metric = (
        list(table(comparison.tuning.get("grid"))),
        tuned_arms(comparison.tuning),
        # Values are chosen by accuracy where runs are timed.
        "loss" if comparison.metric == "loss" else "top1",
    )
    if len(grid) != 1:
        return None
    lines = []
    for arm in arms:
        own = found.get(arm.name, {})
        trials = trials_of(own, metric, grid[0])
        points = [(x, sum(ys) / len(ys)) for x, ys in sorted(trials.items())]
        lost = diverged(own)
        if points:
            name = f"{arm.label}, diverged at {lost}" if lost else arm.label
            lines.append(Line(name, points, arm.index, arm.index // 7))
    if not lines:
        return None
    ticks = sorted({x for line in lines for x, _ in line.points})
    panel = Panel(f"{measure(metric)}, on val", clipped(str(grid[0]), 40), lines, log_x=True, x_ticks=ticks)
    return line_panels([panel], "", 1, size=(400, 270))


def cost_figures(arms: Sequence[ArmView], metric: str) -> dict[str, Figure]:
    """The score of every run against training time, peak memory and images per second, where they are known."""
    kinds: dict[str, tuple[str, float, Callable[[CellRecord], float | None]]] = {
        "training time": ("training time, s", 1.0, lambda cell: cell.seconds),
        "peak memory": ("peak memory, GB", 1e9, lambda cell: cell.memory),
        "images per second": ("images per second", 1.0, lambda cell: cell.speed),
    }
    made = {}
    for name, (label, scale, read) in kinds.items():
        lines = []
        for arm in arms:
            pairs = [(read(cell), cell.score(metric)) for cell in arm.cells]
            points = [
                (cost / scale, value) for cost, value in pairs if cost is not None and value is not None
            ]
            if points:
                lines.append(Line(arm.label, points, arm.index, arm.index // 7))
        if lines:
            made[name] = point_panel(Panel(measure(metric), label, lines))
    return made


def axis_pairs(arms: Sequence[ArmView]) -> list[tuple[str, str]]:
    """Pairs of options of which each has more than one value."""
    names = dict.fromkeys(name for arm in arms for name in arm.options)
    varied = [name for name in names if len({arm.options.get(name) for arm in arms} - {None}) > 1]
    return list(itertools.combinations(varied[:MOST_AXES], 2))


def axes_figure(arms: Sequence[ArmView], metric: str, down: str, across: str) -> Figure | None:
    """The mean over all runs with two values, for all values of two options."""
    rows, columns = (
        list(dict.fromkeys(str(arm.options.get(name, "")) for arm in arms)) for name in (down, across)
    )
    values = np.full((len(rows), len(columns)), np.nan)
    for place in np.ndindex(values.shape):
        here = (rows[place[0]], columns[place[1]])
        own = [arm for arm in arms if (arm.options.get(down, ""), arm.options.get(across, "")) == here]
        if found := [value for arm in own for value in arm.scores]:
            values[place] = sum(found) / len(found)
    if not np.isfinite(values).any():
        return None
    made = NumberMap(
        "", values, [clipped(name, 40) for name in rows], [clipped(name, 14) for name in columns]
    )
    size = (170.0 + 80 * len(columns), 60.0 + 34 * len(rows))
    title = f"{measure(metric)}: {clipped(down, 40)} down, {clipped(across, 40)} across"
    return map_grid([made], title, 1, size=size, write=lambda value: score(value, metric))


def arm_norms(arms: Sequence[ArmView]) -> dict[str, list[NumberMap]]:
    """Norms over depth and time by their title, from the first run of each arm that was probed."""
    found: dict[str, list[Row]] = {}
    for arm in arms:
        runs = (rows for cell in arm.cells if (rows := _probes(cell)))
        if rows := next(runs, []):
            found[arm.label] = rows
    made = {}
    for field, title in NORMS.items():
        maps = (norm_map(label, rows, field) for label, rows in itertools.islice(found.items(), MOST_MAPPED))
        if known := [one for one in maps if one is not None]:
            made[title] = known
    return made


def _probes(cell: CellRecord) -> list[Row]:
    """Measurements of a run; a damaged file gives none, its run is listed with the failures if it is worse."""
    try:
        return [] if cell.record.folder is None else read_lines(cell.record.folder / "probe.jsonl")
    except ConfigError:
        return []
