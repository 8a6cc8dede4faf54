"""The answer of a comparison in a sentence: who wins, or that nobody does, and what that rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fathoms.comparing.arms import Arm, least_of
from fathoms.comparing.statistics import ALPHA, mean_interval, moments, picked_best
from fathoms.comparing.verdicts import BETTER, DROPPED, NO_DIFFERENCE, NO_SPREAD, UNDECIDED, Rules, Verdict
from fathoms.text_table import plural

MOST_LISTED = 4
"""Arms that a sentence names; of more it names three."""
EXPLORATORY = (
    "exploratory: seeds were added after the answer; "
    "equal arms would be called different in up to 10 % of such comparisons"
)
TUNED_BY_BEST = (
    "exploratory: each arm was tuned by the best of single trials; "
    "equal arms would be called different in up to 28 % of such comparisons"
)


def headline(plan: Mapping[str, Any], rules: Rules) -> str:
    """What was compared: model, data, budget, seeds, and the smallest difference that mattered."""
    base = plan.get("base", {})
    recipe = base.get("recipe", {})
    said = [str(base["model"])] if base.get("model") else []
    if "images" in plan:
        # Not their path, which may change: the same data are the same comparison.
        said.append(f"on {plan['images']:,} {plan.get('split', 'test')} images of {plan['classes']} classes")
    if recipe.get("epochs"):
        said.append(f"after {plural(recipe['epochs'], 'epoch')}")
    looks = plan.get("looks") or ([plan["seeds"]] if "seeds" in plan else [])
    seeds = " or ".join(map(str, looks)) + (" seed" if looks == [1] else " seeds") if looks else ""
    named = [" ".join(said), seeds, f"differences of {rules.metric.amount(rules.margin)} matter"]
    return ", ".join(part for part in named if part)


def answer(arms: Sequence[Arm], verdicts: Sequence[Verdict], rules: Rules) -> str:
    """The winner and what it is better than; where some arm is not told apart from the best, no winner."""
    metric, scored = rules.metric, [arm for arm in arms if arm.scores]
    lost = lost_arms(arms, metric.lost)
    if not scored:
        return "no run has ended with a score" + (f"; {lost}" if lost else "")
    best = max(scored, key=lambda arm: metric.sign * arm.mean_with_diverged(metric.chance))
    place = _beside(best.name, verdicts)
    first, last = _stalled(scored)
    if best.diverged:
        last = f"; {len(best.diverged)} of its {best.ended} runs {metric.lost}{last}"
    mean = f"mean {metric.name} {_mean(best, arms, rules)} over {plural(len(best.scores), 'seed')}"
    if len(arms) == 1:
        return f"{first}{best.name} has {mean}{last}; there is no other arm to compare it with"
    level = [*place[UNDECIDED], *place[NO_DIFFERENCE], *place["behind"]]
    lost_names = {arm.name for arm in arms if arm.lost}
    few = [name for name in place["untested"] if name not in lost_names]
    met = {best.name, *(name for v in verdicts if best.name in (v.a, v.b) for name in (v.a, v.b))}
    apart = [arm.name for arm in scored if arm.name not in met]
    order = "highest" if metric.sign > 0 else "lowest"
    if place["better"] and not (level or few or apart or place[NO_SPREAD]):
        every = len(place["better"]) > 1 and not (lost_names or place[DROPPED])
        said = f"{best.name} wins, {mean}; better than {'all others' if every else listed(place['better'])}"
    else:
        said = f"no winner: {listed([best.name, *level])} are not told apart; " if level else "no winner: "
        said += f"{best.name} has the {order} {mean}"
        if place["better"]:
            said += f"; better than {listed(place['better'])}"
        if place["behind"]:
            said += f"; among the other runs behind {listed(place['behind'])}"
    for names, words in (
        (few, "too few seeds against"),
        (place[NO_SPREAD], "no spread over seeds against"),
        (place[DROPPED], "not compared with the dropped"),
        (apart, "untested against"),
    ):
        if names:
            said += f"; {words} {listed(names)}"
    return first + said + (f"; {lost}" if lost else "") + last + _optimism(best, scored, rules)


def _beside(best: str, verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """The other arms of the best one's verdicts, by what they say."""
    found: dict[str, list[str]] = {
        key: [] for key in ("better", "behind", UNDECIDED, NO_DIFFERENCE, NO_SPREAD, DROPPED, "untested")
    }
    for verdict in verdicts:
        if best not in (verdict.a, verdict.b):
            continue
        other = verdict.b if verdict.a == best else verdict.a
        word = verdict.verdict
        if word in BETTER:
            ahead = verdict.a if word == BETTER[0] else verdict.b
            word = "better" if ahead == best else "behind"
        elif word.endswith("more often"):
            word = UNDECIDED if math.isfinite(verdict.low) else "untested"
        found[word if word in found else "untested"].append(other)
    return found


def _stalled(scored: Sequence[Arm]) -> tuple[str, str]:
    """Words on stalled runs: the answer begins with them where no run got beyond guessing, else it ends with them."""
    stalled, runs = sum(len(arm.stalled) for arm in scored), sum(len(arm.scores) for arm in scored)
    if not stalled:
        return "", ""
    if stalled < runs:
        return "", f"; {stalled} of {runs} runs stalled at guessing"
    every = "the only run" if runs == 1 else f"all {runs} runs"
    return f"{every} stalled at guessing, so nothing was learned to compare; ", ""


def _mean(arm: Arm, arms: Sequence[Arm], rules: Rules) -> str:
    """The mean of an arm, and from three seeds on its interval, which holds for all arms at once."""
    digits = rules.metric.digits
    least = least_of({other.name: other for other in arms}, rules.metric)[arm.name]
    mean, interval = f"{arm.mean():.{digits}f}", mean_interval(arm.values, ALPHA / len(arms), least)
    if interval is None:
        return mean
    return f"{mean} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def optimism(arms: Sequence[Arm], rules: Rules) -> float:
    """How much too good the best of equal arms looks on average, in the metric's unit."""
    scored = [arm for arm in arms if len(arm.scores) > 1]
    if len(scored) < 2:
        return 0.0
    least = least_of({arm.name: arm for arm in scored}, rules.metric)
    errors = [max(moments(arm.values)[1], least[arm.name]) / len(arm.scores) for arm in scored]
    return picked_best(len(scored)) * math.sqrt(sum(errors) / len(errors))


def _optimism(best: Arm, scored: Sequence[Arm], rules: Rules) -> str:
    size = optimism(scored, rules) if len(best.scores) > 1 else 0.0
    return (
        f"; as the best of {len(scored)} its mean is up to {rules.metric.amount(size)} too good"
        if size
        else ""
    )


def lost_arms(arms: Sequence[Arm], lost: str) -> str:
    """A clause on arms that lost every run, by diverging or what else it says; empty where there is none."""
    gone = [arm for arm in arms if arm.lost]
    if len(gone) > MOST_LISTED:
        return f"{listed([arm.name for arm in gone])} {lost} in all of their runs"
    return " and ".join(f"{arm.name} {lost} in {len(arm.diverged)} of {arm.ended}" for arm in gone)


def listed(names: Sequence[str]) -> str:
    """Names in a row; those of several options, which have commas themselves, in quotes."""
    shown = [repr(name) if "," in name else name for name in names]
    if len(shown) > MOST_LISTED:
        return f"{', '.join(shown[:3])} and {len(shown) - 3} others"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
