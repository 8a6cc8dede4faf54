"""Accuracy of a trained LayerNorm ViT after its norms are swapped, on CIFAR-10.

    python benchmarks/swap_cifar.py cifar10.npz --device cuda --json

trains the network of the `cifar` recipe for some epochs, swaps its norms in each way, and fine-tunes every
swapped network with the same recipe at one constant learning rate, tuned for none of them. The network that was
not swapped is fine-tuned too: its gain is that of longer training. Accuracies are taken before the swap,
right after it, and after 1 and 5 epochs. Writes results/swap_cifar.json and .md after each seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.data import ArraySource
from fathoms.data.sources.splits import open_splits
from fathoms.evaluate.load import load_run
from fathoms.evaluate.loader import eval_loader
from fathoms.evaluate.metrics import evaluate
from fathoms.evaluate.preprocessing import Preprocessing
from fathoms.models.config import ViTConfig
from fathoms.models.vit import ViT
from fathoms.models.weights import save_weights
from fathoms.models.zoo import model_config
from fathoms.surgery.swap.swap import swap_norms
from fathoms.train.distributed import World, choose_device
from fathoms.train.job import Job, RunOptions
from fathoms.train.recipe import Recipe, read_recipe
from fathoms.train.trainer import Trainer

RESULTS = Path(__file__).parents[1] / "results"
# The norm that replaces LayerNorm, and how; the first row is not swapped.
ARMS = (
    ("layernorm", "not swapped"),
    ("learnable_scaler", "reset"),
    ("learnable_scaler", "keep"),
    ("learnable_scaler", "calibrate"),
    ("dyt", "reset"),
    ("dyt", "calibrate"),
)
COLUMNS = ("before", "right after", "after 1", "after 5")
EPOCHS = 5


@dataclass(frozen=True)
class Bench:
    """Data, folder and settings of the study."""

    data: str
    sources: tuple[ArraySource, ArraySource]
    folder: Path
    recipe: Recipe
    config: ViTConfig
    world: World
    calibration: int

    def batches(self, source: ArraySource, batch: int) -> Any:
        """A split preprocessed as in evaluation, on the device."""
        recipe = self.recipe
        preprocessing = Preprocessing.of(recipe.to_dict())
        loader = eval_loader(source, self.config.image_size, batch, preprocessing, device=self.world.device)
        return loader.epoch(0)

    def accuracy(self, model: nn.Module) -> float:
        """Percent right of the test images, in the precision of training."""
        batches = self.batches(self.sources[1], self.recipe.batch_size)
        dtype = getattr(torch, self.recipe.amp_dtype) if self.recipe.amp else None
        classes = len(self.sources[1].classes)
        return evaluate(model, batches, classes, device=self.world.device, amp_dtype=dtype).top1

    def calibration_images(self) -> Tensor:
        """The first training images."""
        return next(iter(self.batches(self.sources[0], self.calibration))).images

    def train(
        self, name: str, config: ViTConfig, seed: int, start: Path | None = None, **changes: Any
    ) -> Path:
        """A run of the library's trainer; its folder."""
        start_from = None if start is None else str(start)
        # A run is evaluated, and so saved, at its end; fine-tuning after each of its few epochs.
        every = 1 if start is not None else changes["epochs"]
        options = {"output": str(self.folder), "experiment": name, "initial_checkpoint": start_from}
        run = RunOptions(**options, seed=seed, device=str(self.world.device), eval_interval=every)  # pyrefly: ignore
        job = Job(self.data, "vit_small_patch16_224", config, self.recipe.replace(**changes), run)
        Trainer(job, self.world, show=False).run()
        return job.folder


def accuracies(run: Path) -> dict[int, float]:
    """Test accuracy after each epoch that a run reached, from its metrics."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["epoch"]: row["top1"] for row in rows if row["split"] == "val"}


def measure(bench: Bench, seed: int, base_epochs: int, lr: float) -> list[dict[str, Any]]:
    """Every arm's accuracies from one trained network."""
    base = bench.train(f"base-{seed}", bench.config, seed, epochs=base_epochs)
    rows = []
    for to, how in ARMS:
        began = time.monotonic()
        model = load_run(str(base)).model.to(bench.world.device)
        assert isinstance(model, ViT)
        row: dict[str, Any] = {"seed": seed, "to": to, "how": how, "before": bench.accuracy(model)}
        if how != "not swapped":
            report = swap_norms(model, to, how=how, calibrate=bench.calibration_images())
            errors = [site.fit_error for site in report if site.fit_error is not None]
            row |= {"sites": len(report), "fit error": statistics.median(errors)}
        row["right after"] = bench.accuracy(model)
        start = bench.folder / f"{seed}-{to}-{how.replace(' ', '-')}.safetensors"
        save_weights(model, start)
        tuning = {"epochs": EPOCHS, "lr": lr, "sched": "constant", "warmup_epochs": 0.0}
        run = bench.train(start.stem, model.config, seed, start, **tuning)
        after = accuracies(run)
        # A run that diverged has no later accuracies; the table then says so.
        row |= {"after 1": after.get(1), "after 5": after.get(EPOCHS), "by epoch": after}
        row |= {"status": json.loads((run / "summary.json").read_text())["status"]}
        row["seconds"] = round(time.monotonic() - began, 1)
        rows.append(row)
        accuracy = "  ".join(f"{name} {cell([row[name]])}" for name in COLUMNS)
        print(f"seed {seed}  {to:<16} {how:<11}  {accuracy}  ({row['seconds']} s)", flush=True)
    return rows


def cell(values: list[float | None]) -> str:
    """Mean and range of the values that are not None."""
    known = [value for value in values if value is not None]
    lost = "" if len(known) == len(values) else f"{len(values) - len(known)} diverged"
    if not known:
        return lost
    mean = f"{statistics.mean(known):.1f}"
    spread = f" ({min(known):.1f} to {max(known):.1f})" if len(known) > 1 else ""
    return f"{mean}{spread}{', ' + lost if lost else ''}"


def write(rows: list[dict[str, Any]], study: dict[str, Any], output: Path) -> None:
    """Both files of results."""
    (output / "swap_cifar.json").write_text(json.dumps({**study, "rows": rows}, indent=1) + "\n")
    seeds = sorted({row["seed"] for row in rows})
    config, recipe = study["config"], study["recipe"]
    lines = [
        "# What a trained network keeps when its norms are swapped",
        "",
        f"`{study['command']}`, on {study['device']}, torch {study['torch']}.",
        f"CIFAR-10: {study['images'][0]} training and {study['images'][1]} test images. A LayerNorm ViT, "
        f"{config['depth']} blocks of {config['dim']}, {config['patch_size']}x{config['patch_size']} patches, "
        f"recipe `cifar` without RandAugment for {study['base_epochs']} epochs. Each swap uses "
        f"{study['calibration']} training images (`reset` and `keep` only measure on them). "
        f"Fine-tuned with Muon at a constant {study['lr']:g}, batch "
        f"{recipe['batch_size']}, tuned for no row. Percent right of the test images, mean and range over "
        f"seeds {', '.join(map(str, seeds))}.",
        "",
        f"| to | how | {' | '.join(COLUMNS)} |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for to, how in ARMS:
        mine = [row for row in rows if (row["to"], row["how"]) == (to, how)]
        lines.append(f"| {to} | {how} | {' | '.join(cell([row[c] for row in mine]) for c in COLUMNS)} |")
    (output / "swap_cifar.md").write_text("\n".join([*lines, ""]))


def plain_copy(data: str, folder: Path, limit: int | None) -> str:
    """The data as an .npz that opens at once, cut to `limit` images of each split."""
    target = folder / "data.npz"
    with np.load(data, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez(target, **{name: x if name == "classes" else x[:limit] for name, x in arrays.items()})
    return str(target)


def main() -> None:
    """Run every seed, print each row as it comes, and everything as JSON at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="CIFAR-10 as an .npz with x_train, y_train, x_test, y_test and classes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--base-epochs", type=int, default=12)
    parser.add_argument("--dim", type=int, default=192, help="channels; heads have 64 each")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-4, help="of fine-tuning")
    parser.add_argument("--calibration", type=int, default=1024, help="images that a swap sees")
    parser.add_argument("--limit", type=int, help="images of each split, for a quick look")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args()
    table = read_recipe("cifar")
    name = table["model"].pop("name")
    # The norms of q and k act on heads, not on the stream: this study leaves them out.
    switches = {"dim": args.dim, "heads": args.dim // 64, "depth": args.depth, "qk_norm": "none"}
    config = model_config(name, **table.pop("model") | switches)
    table.pop("about")
    recipe = Recipe().replace(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})
    # So few epochs need no RandAugment.
    recipe = recipe.replace(aa=None)
    world = World(0, 1, choose_device(args.device))
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = plain_copy(args.data, folder, args.limit)
        sources = open_splits(data)
        bench = Bench(data, sources, folder, recipe, config, world, args.calibration)
        study = {
            "command": f"python benchmarks/swap_cifar.py DATA --seeds {args.seeds} --dim {args.dim}",
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "images": [len(source) for source in sources],
            "base_epochs": args.base_epochs,
            "lr": args.lr,
            "calibration": min(args.calibration, len(sources[0])),
            "config": config.to_dict(),
            "recipe": recipe.to_dict(),
        }
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            rows += measure(bench, seed, args.base_epochs, args.lr)
            write(rows, {**study, "seconds": round(time.monotonic() - began, 1)}, args.output)
    if args.json:
        print(json.dumps({**study, "seconds": round(time.monotonic() - began, 1), "rows": rows}))


if __name__ == "__main__":
    main()
