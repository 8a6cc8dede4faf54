"""Tables of docs/probe.md: the calibration of the verdict, and what results/probe_cifar holds."""

from __future__ import annotations

from collections.abc import Callable

from doc_format import Read, Row, table
from fathoms.text_table import plural

NAMES = {"none": "no scale", "layerscale": "LayerScale"}


NUMBERS = "probe_cifar/numbers"


def ratios(numbers: Row) -> str:
    """Mean, variation and spread of branch over stream, for each arm, branch and side of training."""
    head = ["residual", "branch", "when", "mean ratio", "deviation / mean", "largest / smallest"]
    rows = []
    for arm, found in numbers["ratios"].items():
        for branch, name in (("attn", "attention"), ("mlp", "MLP")):
            for when, words in (("initial", "at initialisation"), ("trained", "after training")):
                own = found[when][branch]
                rows.append(
                    [
                        *(NAMES[arm], name, words),
                        *(f"{own['mean']:.3g}", f"{own['variation']:.2f}", f"{own['spread']:.3g}"),
                    ]
                )
    return table(head, rows)


def ln0(numbers: Row) -> str:
    """Mean |scale| of ln0 in the centre, the corners and on the edges of a patch."""
    own = numbers["ln0"]
    return (
        f"centre {own['centre']:.4f}, corners {own['corners']:.4f}, edges between them {own['edges']:.4f}, "
        f"all pixels {own['least']:.3f} to {own['largest']:.3f}; a mean over the corners' pixels is uncertain by "
        f"{own['noise']:.4f}"
    )


def price(numbers: Row) -> str:
    """Bits that probing changed, and the time it took."""
    same, runs = numbers["same_bits"], numbers["runs"]
    speed = same["speed"]
    equal = same["losses_equal"] and same["weights_equal"]
    every, default = runs["none_probed"], runs["none_default"]
    often = f"{plural(every['probes'], 'probe')}, {100 * every['probing_share']:.1f} % of the time"
    return (
        f"on {speed['precision']} weights, compiled by {speed['torchcompile']}, launched by {speed['launch']}, "
        f"losses and final weights were {'bit-identical' if equal else 'NOT the same'} without probing, with a probe "
        f"every {same['interval']} updates ({often}) and with "
        f"the default ({plural(default['probes'], 'probe')} in "
        f"{default['training_seconds']:.0f} s, {100 * default['probing_share']:.1f} %)"
    )


def page(numbers: Row) -> str:
    """README.md of the folder, as far as the stages have come."""
    where = numbers["gpu"] or "a CPU"
    lines = [
        "# Inside 24 blocks on CIFAR-10",
        "",
        f"`{numbers['command']}` on {where}, torch {numbers['torch']}, seed {numbers['seed']}.",
    ]
    if len(numbers["ratios"]) == len(NAMES):
        lines += ["", "Branch over stream by depth (`ratios.svg`):", "", ratios(numbers)]
    if "ln0" in numbers:
        side = numbers["ln0"]["side"]
        lines += ["", f"ln0 of Dual PatchNorm on {side} x {side} patches (`ln0.svg`): {ln0(numbers)}."]
    if "same_bits" in numbers:
        lines += ["", f"Probing while training: {price(numbers)}."]
    accuracy = ", ".join(f"{name} {run['top1']:.2f} %" for name, run in numbers["runs"].items())
    return "\n".join([*lines, "", f"Test accuracy: {accuracy}.", ""])


def calibration(read: Read) -> str:
    """Base rate, recall and precision of each verdict."""
    head = ["verdict", "base rate", "recall", "precision", "cells", "told"]
    shares = ("base_rate", "recall", "precision")
    rows = read("probe_calibration")["summary"]["verdicts"]
    return table(
        head,
        (
            [r["verdict"], *(f"{100 * r[key]:.0f} %" for key in shares), str(r["cells"]), str(r["told"])]
            for r in rows
        ),
    )


def accuracy(read: Read) -> str:
    """How often the verdict was right, and how often the most frequent outcome would have been."""
    own = read("probe_calibration")["summary"]
    return (
        f"right in {100 * own['accuracy']:.0f} % of {own['cells']} cells, where always the most frequent outcome "
        f"would be right in {100 * own['most_frequent']:.0f} %"
    )


TEXTS: dict[str, Callable[[Read], str]] = {
    "probe-calibration": calibration,
    "probe-accuracy": accuracy,
    "probe-ratios": lambda read: ratios(read(NUMBERS)),
    "probe-ln0": lambda read: ln0(read(NUMBERS)),
    "probe-price": lambda read: price(read(NUMBERS)),
}
