"""Score the verdict of `fathoms probe`, which fifty updates give, on 300 updates of real runs.

    python benchmarks/probe_score.py run cifar10.npz --jobs 2 --seconds 500   # goes on where it stopped
    python benchmarks/probe_score.py score                                    # writes results/probe_score.{json,md}

The rule, `fathoms.probes.verdict.outcome_of`, has no threshold that was fitted to runs. The outcome of a cell is the
same rule after 300 updates. Cells come in an order by lot, so that those that have ended are a fair sample.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fathoms.probes.verdict import outcome_of

RESULTS = Path(__file__).parents[1] / "results"
UPDATES, BATCH, IMAGES = 300, 32, 4096
SWITCHES: dict[str, dict[str, Any]] = {
    "layernorm": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "scaler, normal": {"norm": "learnable_scaler", "norm_init": "normal"},
    "scaler, ones": {"norm": "learnable_scaler", "norm_init": "ones"},
    "dyt": {"norm": "dyt"},
    "derf": {"norm": "derf"},
    "no norm": {"norm": "none"},
    "no norm, fixup": {"norm": "none", "residual": "fixup"},
    "no norm, rezero": {"norm": "none", "residual": "rezero"},
    "post-norm": {"attn_placement": "post", "mlp_placement": "post"},
    "pre-post": {"attn_placement": "pre_post", "mlp_placement": "pre_post"},
    "layerscale": {"residual": "layerscale"},
    "tfixup": {"residual": "tfixup"},
    "completep": {"residual": "completep", "base_depth": 12},
    "talking heads": {"attention": "talking_heads"},
    "class attention, qk norm": {"readout": "class_attention", "qk_norm": "rmsnorm"},
}
DEPTHS, RATES, DATA = (12, 36), (1e-4, 1e-3, 1e-2), ("digits", "cifar10")


def cells() -> list[tuple[str, int, float, str]]:
    """The grid in an order that is no order, so that any beginning of it is a fair sample."""
    every = list(itertools.product(SWITCHES, DEPTHS, RATES, DATA))
    random.Random(0).shuffle(every)
    return every


def images_of(name: str, path: Path | None) -> tuple[Any, Any, int]:
    """Images, labels and patch size of a data set."""
    import numpy as np
    import torch

    if name == "digits":
        from fathoms.data.sources.arrays import digits

        images, labels = digits(8, 3)
        return images, labels, 2
    with np.load(str(path)) as arrays:
        images, labels = arrays["x_train"][:IMAGES], arrays["y_train"][:IMAGES]
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return (x - 0.47) / 0.25, torch.from_numpy(labels.astype(np.int64)), 8


def train(cell: tuple[str, int, float, str], path: Path | None) -> dict[str, Any]:
    """The losses of one cell."""
    import torch

    from fathoms.models.config import ViTConfig
    from fathoms.models.vit import ViT
    from fathoms.probes import take_first_steps

    switch, depth, lr, data = cell
    images, labels, patch = images_of(data, path)
    begun = time.perf_counter()
    torch.manual_seed(0)
    shape = {"image_size": images.shape[-1], "patch_size": patch, "dim": 32, "heads": 2, "num_classes": 10}
    model = ViT(ViTConfig(**{**shape, "depth": depth, "readout": "mean", **SWITCHES[switch]}))
    steps = take_first_steps(model, images, labels, lr=lr, steps=UPDATES, batch_size=BATCH)
    losses = [None if loss != loss or loss == float("inf") else round(loss, 4) for loss in steps.losses]
    return {
        "switch": switch,
        "depth": depth,
        "lr": lr,
        "data": data,
        "losses": losses,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def work(file: Path, path: Path | None, share: int, jobs: int, seconds: float) -> None:
    """One worker: its share of the cells that are not there yet, until the time is up."""
    end = time.monotonic() + seconds
    done = {key_of(row) for row in rows_of(file)}
    for cell in cells()[share::jobs]:
        if cell in done:
            continue
        if time.monotonic() > end:
            return
        row = train(cell, path)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def key_of(row: dict[str, Any]) -> tuple[str, int, float, str]:
    """The cell of a row."""
    return row["switch"], row["depth"], row["lr"], row["data"]


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The cells that have ended."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


GUESS = math.log(10)
"""Both data sets have ten classes of nearly the same size."""
DRAWS = 4000


def told(row: dict[str, Any], updates: int) -> str:
    """What the first losses of a cell say."""
    losses = [math.nan if loss is None else loss for loss in row["losses"][:updates]]
    return outcome_of(losses, GUESS)


RULES = {
    "always trains": lambda _: "trains",
    "ten updates": lambda row: told(row, 10),
    "fifty updates": lambda row: told(row, 50),
    "fifty updates, else trains": lambda row: told(row, 50).replace("not judged", "trains"),
}


def score(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often each rule judges and is right, with intervals over the switches."""
    truth = [told(row, UPDATES) for row in rows]
    found = {name: [rule(row) for row in rows] for name, rule in RULES.items()}
    by_switch = [
        [i for i, row in enumerate(rows) if row["switch"] == name]
        for name in sorted({row["switch"] for row in rows})
    ]

    def shares(said: list[str], cells: list[int]) -> dict[str, float]:
        judged = [i for i in cells if said[i] != "not judged"]
        right = [i for i in judged if said[i] == truth[i]]
        of = {name: [i for i in judged if said[i] == name] for name in ("trains", "diverges")}
        one = {
            name: sum(truth[i] == name for i in own) / len(own) if own else math.nan
            for name, own in of.items()
        }
        return {
            "judged": len(judged) / len(cells),
            "right_of_judged": len(right) / len(judged) if judged else math.nan,
            "right_of_all": len(right) / len(cells),
            "trains_came_true": one["trains"],
            "diverges_came_true": one["diverges"],
        }

    rng = random.Random(0)
    summary = {}
    for name, said in found.items():
        whole = shares(said, list(range(len(rows))))
        draws = [
            shares(said, [i for cells in rng.choices(by_switch, k=len(by_switch)) for i in cells])
            for _ in range(DRAWS)
        ]
        summary[name] = {
            key: [value, *interval([draw[key] for draw in draws])] for key, value in whole.items()
        }
    outcomes = {name: truth.count(name) for name in ("trains", "diverges", "not judged")}
    early = sum(None in row["losses"][:50] for row in rows)
    return {
        "cells": len(rows),
        "planned": len(cells()),
        "switches": len(by_switch),
        "outcomes": outcomes,
        "not_finite_within_fifty": early,
        "rules": summary,
        "rows": [
            {key: row[key] for key in ("switch", "depth", "lr", "data")}
            | {"outcome": truth[i]}
            | {name: said[i] for name, said in found.items() if name != "always trains"}
            for i, row in enumerate(rows)
        ],
    }


def interval(values: list[float]) -> list[float]:
    """From the 2.5th to the 97.5th percentile."""
    known = sorted(value for value in values if not math.isnan(value))
    return [known[round(share * (len(known) - 1))] for share in (0.025, 0.975)] if known else [math.nan] * 2


def page(found: dict[str, Any]) -> str:
    """The score as Markdown."""

    def cell(value: list[float]) -> str:
        middle, low, high = (100 * number for number in value)
        return "-" if math.isnan(middle) else f"{middle:.0f} ({low:.0f} to {high:.0f})"

    ends, early = found["outcomes"], found["not_finite_within_fifty"]
    lines = [
        "# The verdict of the first updates on 300 updates",
        "",
        "`python benchmarks/probe_score.py run cifar10.npz` and `score`; "
        f"{found['cells']} of {found['planned']} cells, in an order by lot: 16 switches,",
        f"depths {DEPTHS}, rates {RATES}, the digits and {IMAGES:,} images of CIFAR-10,",
        f"32 channels, batches of {BATCH}, AdamW without warm-up, one seed.",
        "",
        f"After {UPDATES} updates {ends['trains']} cells train, {ends['diverges']} have diverged and "
        f"{ends['not judged']} are no better than a guess;",
        f"{early} of those that diverged were not finite within fifty. No threshold was fitted.",
        f"Percent, with 95 % intervals over the {found['switches']} switches; "
        '"right of all" counts a start that is not judged as wrong.',
        "",
        '| rule | judged | right of judged | right of all | "trains" came true | "diverges" came true |',
        "|---|---|---|---|---|---|",
    ]
    keys = ("judged", "right_of_judged", "right_of_all", "trains_came_true", "diverges_came_true")
    lines += [
        f"| {name} | {' | '.join(cell(row[key]) for key in keys)} |" for name, row in found["rules"].items()
    ]
    wrong = [
        f"- {row['switch']}, depth {row['depth']}, lr {row['lr']:g}, {row['data']}: told {row['fifty updates']}, "
        f"was {row['outcome']}"
        for row in found["rows"]
        if row["fifty updates"] not in ("not judged", row["outcome"])
    ]
    return "\n".join([*lines, "", "## Where fifty updates were wrong", "", *(wrong or ["- nowhere"]), ""])


def main() -> int:
    """Run or score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "work", "score"])
    parser.add_argument("data", nargs="?", type=Path, help="CIFAR-10 as an .npz")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no cell begins")
    parser.add_argument("--file", type=Path, default=RESULTS / "probe_score.jsonl", help="rows as they end")
    arguments = parser.parse_args()
    if arguments.what == "score":
        found = score(rows_of(arguments.file))
        (RESULTS / "probe_score.json").write_text(json.dumps(found, indent=1).replace("NaN", "null") + "\n")
        (RESULTS / "probe_score.md").write_text(page(found))
        print(json.dumps(found["rules"]))
        return 0
    if arguments.what == "work":
        work(arguments.file, arguments.data, arguments.share, arguments.jobs, arguments.seconds)
        return 0
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    same = [str(arguments.data), "--file", str(arguments.file), "--seconds", str(arguments.seconds)]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "work", *same, "--jobs", str(arguments.jobs), "--share", str(share)],
            env=own,
        )
        for share in range(arguments.jobs)
    ]
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
