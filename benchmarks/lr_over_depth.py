"""Does the best learning rate stay as a ViT gets deeper? Sweeps of CIFAR-10, as `fathoms compare` commands.

    python benchmarks/lr_over_depth.py cifar10.npz              # print the commands and what they cost
    python benchmarks/lr_over_depth.py cifar10.npz --run        # run them; the same command continues
    python benchmarks/lr_over_depth.py cifar10.npz --summarise  # write results/lr_over_depth.{json,md,svg}

One comparison for each residual method and depth: 5 learning rates x 3 seeds of a ViT of 192 channels under AdamW, for
a few epochs. With a method under which the learning rate transfers, the best one is the same at every depth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
METHODS = ("none", "layerscale", "completep")
DEPTHS = (6, 12, 24, 48)
RATES = ("0.0003", "0.0006", "0.0012", "0.0024", "0.0048")
SEEDS = 3
EPOCHS = 10
# Measured on an H200: images of 32 pixels a second in training 12 blocks of 192 channels, patches of 4.
IMAGES_PER_SECOND = 58_000
IMAGES = 50_000
# Building, compiling and evaluating a run.
OVERHEAD_S = 5.0

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")


def command(data: str, output: str, method: str, depth: int) -> list[str]:
    """One sweep over learning rates."""
    shape = ["--dim", "192", "--heads", "3", "--depth", str(depth), "--residual", method]
    budget = ["--epochs", str(EPOCHS), "--warmup-epochs", "1", "--opt", "adamw", "--clip-grad", "1"]
    rest = ["--seeds", str(SEEDS), "--keep", "none", "--output", output, "--experiment", f"{method}-{depth}"]
    axis = ["--axis", f"lr={','.join(RATES)}", "--metric", "loss", "--smallest-difference", "0.02"]
    return ["fathoms", "compare", data, "--recipe", "cifar", *shape, *budget, *axis, *rest]


def seconds(depth: int) -> float:
    """Expected time of one sweep, at a speed that falls with the depth."""
    epoch = IMAGES * depth / (12 * IMAGES_PER_SECOND)
    return len(RATES) * SEEDS * (EPOCHS * epoch + OVERHEAD_S)


def read(output: Path) -> list[dict[str, Any]]:
    """One row for each method, depth and rate: loss and accuracy of its seeds."""
    rows = []
    for method in METHODS:
        for depth in DEPTHS:
            path = output / f"{method}-{depth}" / "results.json"
            if not path.is_file():
                sys.exit(f"{path}: there is no such comparison yet; run this with --run first")
            cells = json.loads(path.read_text())["cells"]
            for rate in RATES:
                own = [cell for cell in cells if float(cell["arm"]["lr"]) == float(rate)]
                done = [cell for cell in own if cell["status"] == "done"]
                rows.append(
                    {
                        "residual": method,
                        "depth": depth,
                        "lr": float(rate),
                        "loss": [cell["loss"] for cell in done],
                        "top1": [cell["top1"] for cell in done],
                        "failed": len(own) - len(done),
                    }
                )
    return rows


def best(rows: list[dict[str, Any]], method: str, depth: int) -> dict[str, Any]:
    """The rate with the least mean loss among those whose runs all ended, and how wide the valley is."""
    own = [row for row in rows if (row["residual"], row["depth"]) == (method, depth)]
    whole = [row for row in own if row["loss"] and not row["failed"]]
    if not whole:
        return {"lr": None, "edge": False, "row": own[0]}
    found = min(whole, key=lambda row: statistics.fmean(row["loss"]))
    return {"lr": found["lr"], "edge": found["lr"] in (float(RATES[0]), float(RATES[-1])), "row": found}


def as_table(rows: list[dict[str, Any]]) -> str:
    """The best rate of each method and depth, and all losses, as Markdown."""
    lines = [
        "# The best learning rate by depth",
        "",
        "Made by `python benchmarks/lr_over_depth.py cifar10.npz --run --summarise`: "
        f"CIFAR-10, {EPOCHS} epochs, AdamW, 192 channels, {SEEDS} seeds; the best rate has the least mean test loss. "
        "A rate marked * is at the edge of those tried, so the true one may be beyond it.",
        "",
        "| residual | " + " | ".join(f"depth {depth}" for depth in DEPTHS) + " | largest / smallest |",
        "|---" * (len(DEPTHS) + 2) + "|",
    ]
    for method in METHODS:
        found = [best(rows, method, depth) for depth in DEPTHS]
        cells = [_best_cell(each) for each in found]
        known = [each["lr"] for each in found if each["lr"]]
        spread = f"{max(known) / min(known):g}" if known else "–"
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {spread} |")
    lines += ["", "| residual | depth | " + " | ".join(RATES) + " |", "|---" * (len(RATES) + 2) + "|"]
    for method in METHODS:
        for depth in DEPTHS:
            own = [row for row in rows if (row["residual"], row["depth"]) == (method, depth)]
            lines.append(f"| {method} | {depth} | " + " | ".join(_loss_cell(row) for row in own) + " |")
    return "\n".join(lines) + "\n"


def _best_cell(found: dict[str, Any]) -> str:
    if found["lr"] is None:
        return "none ended"
    return f"{found['lr']:g}{'*' if found['edge'] else ''} ({statistics.fmean(found['row']['top1']):.1f} %)"


def _loss_cell(row: dict[str, Any]) -> str:
    if not row["loss"]:
        return "diverged"
    spread = f" ± {statistics.stdev(row['loss']):.3f}" if len(row["loss"]) > 1 else ""
    return f"{statistics.fmean(row['loss']):.3f}{spread}" + (
        f", {row['failed']} failed" if row["failed"] else ""
    )


def as_picture(rows: list[dict[str, Any]]) -> str:
    """Loss against learning rate, one panel for each method and one curve for each depth, as SVG."""
    losses = [statistics.fmean(row["loss"]) for row in rows if row["loss"]]
    low, high = min(losses), min(max(losses), 2.4)
    width, height, parts = 300, 220, []
    for panel, method in enumerate(METHODS):
        left = 50 + panel * width
        parts.append(f'<text x="{left + 110}" y="20" text-anchor="middle">{method}</text>')
        parts.append(
            f'<rect x="{left}" y="30" width="230" height="{height - 40}" fill="none" stroke="#999"/>'
        )
        for index, rate in enumerate(RATES):
            parts.append(
                f'<text x="{left + 15 + 50 * index}" y="{height + 5}" text-anchor="middle">{float(rate):g}</text>'
            )
        for colour, depth in zip(COLOURS, DEPTHS, strict=True):
            parts += _curve(rows, method, depth, colour, left, (low, high))
    for index, (colour, depth) in enumerate(zip(COLOURS, DEPTHS, strict=True)):
        parts.append(f'<text x="{60 + 90 * index}" y="{height + 30}" fill="{colour}">depth {depth}</text>')
    parts.append(f'<text x="8" y="40">{high:.2f}</text><text x="8" y="{height - 12}">{low:.2f}</text>')
    style = 'font-family="sans-serif" font-size="11"'
    size = f'width="{50 + width * len(METHODS)}" height="{height + 40}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def _curve(
    rows: list[dict[str, Any]], method: str, depth: int, colour: str, left: int, span: tuple[float, float]
) -> list[str]:
    """One curve, with a ring around its lowest point; losses above the panel are at its top."""
    points = []
    own = [row for row in rows if (row["residual"], row["depth"]) == (method, depth)]
    for index, row in enumerate(own):
        if row["loss"]:
            share = (min(statistics.fmean(row["loss"]), span[1]) - span[0]) / max(span[1] - span[0], 1e-9)
            points.append((left + 15 + 50 * index, 205 - 165 * share))
    if not points:
        return []
    x, y = max(points, key=lambda point: point[1])
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{colour}" stroke-width="2"/>'
    return [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>', ring]


def main() -> None:
    """Print, run or summarise the sweeps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="CIFAR-10, as for fathoms train")
    parser.add_argument("--output", default="runs/lr_over_depth", help="folder of the comparisons")
    parser.add_argument("--run", action="store_true", help="run the commands")
    parser.add_argument("--summarise", action="store_true", help="write table and picture from their results")
    arguments = parser.parse_args()
    if not (arguments.run or arguments.summarise):
        total = sum(seconds(depth) for _ in METHODS for depth in DEPTHS)
        for method in METHODS:
            for depth in DEPTHS:
                print(f"# {seconds(depth) / 60:.1f} minutes")
                print(" ".join(command(arguments.data, arguments.output, method, depth)))
        runs = len(METHODS) * len(DEPTHS) * len(RATES) * SEEDS
        print(f"# {runs} runs, {total / 60:.0f} minutes at {IMAGES_PER_SECOND:,} images/s for 12 blocks")
    if arguments.run:
        for depth in DEPTHS:
            for method in METHODS:
                words = command(arguments.data, arguments.output, method, depth)
                subprocess.run([sys.executable, "-m", *words], check=True)
    if arguments.summarise:
        rows = read(Path(arguments.output))
        (RESULTS / "lr_over_depth.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        (RESULTS / "lr_over_depth.md").write_text(as_table(rows))
        (RESULTS / "lr_over_depth.svg").write_text(as_picture(rows))


if __name__ == "__main__":
    main()
