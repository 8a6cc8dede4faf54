"""The leading arm of a comparison, and what is said of the others, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from fathoms.compare.arms import Arm, Metric, listed, lost_arms
from fathoms.compare.spread import mean_interval
from fathoms.compare.verdicts import NO_SPREAD, Verdict
from fathoms.text_table import plural


def leader(arms: Sequence[Arm], verdicts: Sequence[Verdict], metric: Metric) -> str:
    """The answer in one sentence: the best arm, and which others are not separated from it."""
    scored = [arm for arm in arms if arm.scores]
    lost = lost_arms(arms)
    if not scored:
        return "no run has ended with a score" + (f"; {lost}" if lost else "")
    best = max(scored, key=lambda arm: metric.sign * arm.mean_with_diverged(metric.chance))
    beaten, open_, same, flat, untested = [], [], [], [], []
    lists = {
        "a better": beaten,
        "b better": beaten,
        "equivalent": same,
        "not separated": open_,
        NO_SPREAD: flat,
    }
    for verdict in verdicts:
        if best.name in (verdict.a, verdict.b):
            other = verdict.b if verdict.a == best.name else verdict.a
            lists.get(verdict.verdict, untested).append(other)
    over = (
        f"a mean {metric.name} of {_mean_and_interval(best, metric)} over {plural(len(best.scores), 'seed')}"
    )
    first, last = _stalled(scored)
    last = (f"; {best.diverged} of its {best.ended} runs diverged" if best.diverged else "") + last
    if len(arms) == 1:
        return f"{first}{best.name} has {over}{last}; there is no other arm to compare it with"
    said = f"{first}{best.name} leads with {over}"
    for names, words in ((beaten, "better than"), (same, "equivalent to"), (open_, "not separated from")):
        if names:
            said += f"; {words} {listed(names)}"
    gone = {arm.name for arm in arms if arm.lost}
    if few := [name for name in untested if name not in gone]:
        said += f"; too few seeds against {listed(few)}"
    if flat:
        said += f"; no spread over seeds against {listed(flat)}"
    return said + (f"; {lost}" if lost else "") + last


def _stalled(scored: Sequence[Arm]) -> tuple[str, str]:
    """Words on stalled runs: the answer begins with them where no run got beyond guessing, else it ends with them."""
    stalled, runs = sum(arm.stalled for arm in scored), sum(len(arm.scores) for arm in scored)
    if not stalled:
        return "", ""
    if stalled < runs:
        return "", f"; {stalled} of {runs} runs stalled at guessing"
    every = "the only run" if runs == 1 else f"all {runs} runs"
    return f"{every} stalled at guessing, so nothing was learned to compare; ", ""


def _mean_and_interval(arm: Arm, metric: Metric) -> str:
    """The mean of an arm, and from three seeds on Student's 95 % interval of it."""
    digits = metric.digits
    mean, interval = f"{arm.mean():.{digits}f}", mean_interval(arm.values, least=metric.rounding)
    if interval is None:
        return mean
    return f"{mean} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"
