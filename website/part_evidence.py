"""Evidence on one part: what the comparisons, coordinate checks and swaps in results/ say of it."""

from __future__ import annotations

import statistics

import numbers_evidence
from doc_format import Read, Row, table

DATA = {
    "cifar10.npz": "CIFAR-10",
    "cifar100.npz": "CIFAR-100",
    "cifar10_5000.npz": "5,000 images of CIFAR-10",
}
NOTHING = "Not known: nothing has been run here."


def compared(read: Read, family: str, name: str) -> list[str]:
    """A sentence for each arm of a published comparison that has this part as a value of an axis."""
    said = []
    for folder in numbers_evidence.QUESTIONS:
        plan, results = read(f"compare/{folder}/plan"), read(f"compare/{folder}/results")
        values = {options.get(family) for options in plan["arms"].values()}
        if len(values) < 2:
            continue
        arms = {arm["name"]: arm for arm in results["arms"]}
        for arm, options in plan["arms"].items():
            # An arm of which no run has ended with a score says nothing.
            if options.get(family) == name and arm in arms and arms[arm]["mean"] is not None:
                said.append(_sentence(folder, plan, arms[arm], results))
    return said


def _sentence(folder: str, plan: Row, arm: Row, results: Row) -> str:
    verdicts = results["verdicts"]
    config = {**(plan["base"]["config"] or {}), **plan["arms"][arm["name"]]}
    recipe = plan["base"]["recipe"]
    where = (
        f"{DATA.get(plan['data'], plan['data'])}, {config.get('depth')} blocks of {config.get('dim')}, patch "
        f"{config.get('patch_size')}, {recipe['epochs']} epochs, {arm['seeds']} seeds"
    )
    own = f"`{arm['name']}` {arm['mean']:.2f} % (sd {arm['sd']:.2f})"
    against = [verdict for verdict in verdicts if verdict["a"] == arm["name"]][:1]
    if against and plan["baseline"]:
        found = against[0]
        word = numbers_evidence.verdict_word(folder, results, found)
        gap = ""
        if found["low"] is not None:
            gap = f" {found['difference']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"
        own += f",{gap} against `{found['b']}`: {word}"
    elif plan["baseline"] and arm["name"] in {verdict["b"] for verdict in verdicts}:
        own += ", the baseline"
    return f"{where}: {own} ([all arms](evidence.md), `results/compare/{folder}`)"


def coordinates(read: Read, name: str) -> str:
    """How a residual method's updates grow with depth."""
    row = read("coordinates")["rows"].get(name)
    if row is None:
        return ""
    stream = row["stream"]
    return (
        f"Coordinate check over depths {', '.join(map(str, row['sizes']))}: ten updates move the stream as depth to "
        f"the power {stream['slope']:+.2f} ({stream['low']:+.2f} to {stream['high']:+.2f}) "
        "([all methods](../results/coordinates.md))"
    )


def swapped(read: Read, name: str) -> str:
    """A trained LayerNorm network whose norms were swapped for this one."""
    rows = [row for row in read("swap_cifar")["rows"] if (row["to"], row["how"]) == (name, "calibrate")]
    if not rows:
        return ""
    before, now, later = (
        statistics.mean(row[key] for row in rows) for key in ("before", "right after", "after 5")
    )
    return (
        f"In place of LayerNorm in a trained network (CIFAR-10, {len(rows)} seeds, calibrated): {before:.1f} % before, "
        f"{now:.1f} % right after, {later:.1f} % five epochs later ([all rows](../results/swap_cifar.md))"
    )


# Part of each row of results/parts.json that is not a residual rule.
TIMED = {
    ("attn_placement", "keel"): "keel",
    ("attn_gate", "head"): "head_gate",
    ("attn_gate", "channel"): "channel_gate",
    ("stem", "conv"): "conv_stem",
    ("readout", "seqpool"): "seqpool",
}


def speed(read: Read, family: str, name: str) -> str:
    """Training speed and memory beside the plain model."""
    row = read("parts")["rows"].get(name if family == "residual" else TIMED.get((family, name), ""))
    if row is None:
        return ""
    return (
        f"Speed: trains at {row['ratio']:.2f} times the images per second of the plain model, in "
        f"{row['memory_ratio']:.2f} of its memory ({row['device']}; [all parts](../results/parts.md))"
    )


def evidence(read: Read, family: str, name: str) -> list[str]:
    """All that was measured here of a part in training; one sentence that says so if that is nothing."""
    said = compared(read, family, name)
    if family == "residual":
        said.append(coordinates(read, name))
    if family == "norm":
        said.append(swapped(read, name))
    said.append(speed(read, family, name))
    return [each for each in said if each] or [NOTHING]


def signal_table(read: Read) -> str:
    """Growth of the stream, and gradient at the first block over the last, by depth; even parts in one sentence."""
    residuals = [
        {**row, "part": f"`residual={row['residual']}`, {row['form']}"}
        for row in read("signal_at_init")["rows"]
    ]
    others = [{**row, "part": f"`{row['family']}={row['part']}`"} for row in read("signal_by_part")["rows"]]
    found: dict[str, dict[int, Row]] = {}
    for row in (*residuals, *others):
        found.setdefault(row["part"], {})[row["depth"]] = row
    depths = sorted({depth for own in found.values() for depth in own})
    even = [
        part
        for part, own in found.items()
        if all(0.5 <= row[key] <= 2 for row in own.values() for key in ("growth", "gradient_ratio"))
    ]
    rows = [
        [part, *(_pair(own[depth]) if depth in own else "" for depth in depths)]
        for part, own in found.items()
        if part not in even
    ]
    return (
        table(["part", *(f"{depth} blocks" for depth in depths)], rows)
        + f"\n\nWithin a factor of two at every depth: {', '.join(even)}."
    )


def _pair(row: Row) -> str:
    return f"{row['growth']:.3g} · {row['gradient_ratio']:.3g}"
