"""Output of `fathoms probe` for one model: the summary and the verdict in sentences."""

from __future__ import annotations

from typing import Any

from fathoms.errors import flag_of
from fathoms.text_table import aligned, plural

_SHOWN = ("stream", "ratio", "gradient_rms", "weights_rms", "entropy", "logit", "token_cosine", "largest")


def summary(found: dict[str, Any]) -> list[str]:
    """Summary that fits a screen: nine sites from the first to the last, and the verdict."""
    sites = found["sites"]
    chosen = sorted({round(i * (len(sites) - 1) / 8) for i in range(9)})
    columns = [name for name in _SHOWN if any(sites[i].get(name) is not None for i in chosen)]
    rows = [
        (sites[i]["block"], sites[i]["branch"], *(_number(sites[i].get(name)) for name in columns))
        for i in chosen
    ]
    head = f"{found['model']}: {plural(found['blocks'], 'block')}, {plural(found['images'], 'image')}"
    every = len(chosen) == len(sites)
    shown = f"{len(sites)} branches (--full shows every column)"
    lines = [f"{head}; {shown if every else f'{len(chosen)} of {len(sites)} branches (--full shows all)'}"]
    lines += aligned(("block", "branch", *columns), rows).splitlines()
    if found["projection_ratio"] is not None:
        layer, times = found["projection"]["layer"], _number(found["projection_ratio"])
        lines.append(f"Gradient on a weight of {layer}: {times} times that of the median branch")
    lines += [f"Not measured: {sentence}" for sentence in found.get("unseen", ())]
    return [*lines, "", *words(found)]


def _number(value: float | None) -> str:
    # Adding zero turns the -0 that rounding leaves into 0.
    return "-" if value is None else f"{value + 0.0:.3g}"


def words(found: dict[str, Any]) -> list[str]:
    """The verdict in sentences, each with what usually helps."""
    lines = []
    start, steps = found["start"], found.get("steps")
    if found["trained"]:
        drift = found.get("drift")
        lines.append(
            "Drift: no probe.jsonl with four measurements or more"
            if drift is None
            else f"Drift: {drift['outcome']}"
        )
        findings = [*(drift or {"findings": []})["findings"], *(f for f in start["findings"] if not f["bad"])]
    else:
        basis = "from the initialisation alone" if steps is None else _basis(start, steps)
        lines.append(f"Start: {SAYS[start['outcome']]} ({basis})")
        findings = start["findings"]
    lines += [f"  - {finding['text']}; usual help: {finding['helps']}" for finding in findings]
    return lines


SAYS = {
    "trains": "expected to train",
    "stalls": "expected to STALL",
    "diverges": "expected to DIVERGE",
    "not judged": "not judged",
}


def _basis(start: dict[str, Any], steps: dict[str, Any]) -> str:
    """The steps that a verdict rests on, and how often such verdicts came true where that was measured."""
    taken = plural(len(steps["losses"]), "step")
    text = f"{steps['opt']} at lr {steps['lr']:g}, {taken}, loss {_loss(steps)}"
    share = start.get("came_true")
    return text if share is None else f"{text}; {share:.0%} of such verdicts came true"


def _loss(steps: dict[str, Any]) -> str:
    losses = steps["losses"]
    return " -> ".join("not finite" if loss is None else f"{loss:.3g}" for loss in (losses[0], losses[-1]))


def default_note(config: dict[str, Any], switches: dict[str, Any]) -> list[str]:
    """A line where `fathoms train` with the same flags trains another model than the default that was probed."""
    from fathoms.train.recipe.files import read_recipe

    trained = {**read_recipe("digits")["model"], **switches}
    differ = [name for name, value in trained.items() if name != "name" and config[name] != value]
    if not differ:
        return []
    flags = " ".join(f"{flag_of(name)} {trained[name]}" for name in differ)
    return [f"Note: `fathoms train` takes the model of its recipe digits; to probe that, add {flags}"]


def say_written(files: list[str]) -> None:
    """Print the names of the files that were written."""
    if files:
        print(f"written: {', '.join(files)}")
