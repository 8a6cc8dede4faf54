"""Speed of timm's models before and after `accelerate`, at their image size.

    python benchmarks/accelerate_timm.py [--device cuda] [--json]

Each model, its copy (whose time shows the noise of the machine) and the accelerated model run in turn: a forward
pass in inference, and a forward and backward pass in training. On a CPU the time is that of the process itself, on
one thread, in float32 at batch 2 and with 4 blocks; on a GPU whole models run at batch 64 under bfloat16 autocast,
and the memory of a training pass on top of the models is measured too. Writes results/accelerate_DEVICE.json and .md.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from fathoms.surgery.accelerate import accelerate
from fathoms.surgery.inputs import example_images
from timing import peak_mib

RESULTS = Path(__file__).parents[1] / "results"
MODELS = ("cait_xxs24_224", "cait_s24_224")


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Duration of a call: time of the device, or CPU time of this process."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize(device)
    return start_event.elapsed_time(end_event) / 1e3


def in_turn(models: list[nn.Module], call: Callable[[nn.Module], Any], device: torch.device) -> list[float]:
    """The best milliseconds of each model, after a few passes to warm up."""
    best = [float("inf")] * len(models)
    for number in range(10):
        for index, model in enumerate(models):
            passed = seconds(lambda model=model: call(model), device)
            if number > 2:
                best[index] = min(best[index], 1e3 * passed)
    return best


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """One model's row."""
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    model = timm.create_model(name, **({} if cuda else {"depth": 4})).to(device)
    faster = copy.deepcopy(model)
    report = accelerate(faster)
    models = [model, copy.deepcopy(model), faster]
    images: Tensor = example_images(model, 64 if cuda else 2)

    def forward(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
            return model(images)

    @torch.no_grad()
    def inference(model: nn.Module) -> None:
        forward(model.eval())

    def training(model: nn.Module) -> None:
        forward(model.train()).float().square().mean().backward()
        model.zero_grad()

    row: dict[str, Any] = {
        "model": name if cuda else f"{name}, 4 blocks",
        "replaced": dict(Counter(new for _, _, new in report.rows)),
        "difference": report.difference,
        "inference": in_turn(models, inference, device),
        "training": in_turn(models, training, device),
    }
    if cuda:
        row["peak"] = [peak_mib(lambda each=each: training(each)) for each in models]
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    kinds = {"inference": "ms", "training": "ms", "peak": "MiB"}
    shown = {kind: unit for kind, unit in kinds.items() if kind in rows[0]}
    columns = ["model", "replaced", "difference"]
    columns += [f"{kind} {unit}: before, copy, after" for kind, unit in shown.items()]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        replaced = ", ".join(f"{count} {kind}" for kind, count in row["replaced"].items())
        cells = [", ".join(f"{value:.1f}" for value in row[kind]) for kind in shown]
        lines.append(f"| {row['model']} | {replaced} | {row['difference']:.1e} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure every model, print each row, write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        rows.append(measure(name, device))
        print(table(rows)[-1], flush=True)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread"
    command = f"python benchmarks/accelerate_timm.py --device {args.device}"
    result = {
        "command": command,
        "device": where,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "rows": rows,
    }
    (args.output / f"accelerate_{args.device}.json").write_text(json.dumps(result, indent=1) + "\n")
    head = [
        f"# `accelerate` on timm's models: {where}",
        "",
        f"`{command}`, torch {torch.__version__}, timm {timm.__version__}. 224 pixel images; the copy is the model "
        "again, so its time shows the noise of the machine.",
        "",
    ]
    (args.output / f"accelerate_{args.device}.md").write_text("\n".join([*head, *table(rows), ""]))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
