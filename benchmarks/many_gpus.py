"""ImageNet recipes on several GPUs, what is measured and what is computed: `python benchmarks/many_gpus.py --measure`.

Measured, with `--measure` on one GPU, about two minutes: the update of each recipe at an eighth of its global batch, as
`fathoms train` runs it (blocks compiled, or the whole model where penalties look into blocks; forward and backward
pass as a CUDA graph), and on one rank of NCCL what exchanging gradients costs beside the links: flattening, the call
and unflattening; the same for `--fsdp`, whose weights are gathered too. Computed: the bytes that eight GPUs exchange at
assumed rates of their links, nothing overlapped, and with both the hours of each recipe. Rows are kept in
results/many_gpus.json and written after each; the table is in docs/speed.md. Without `--measure` the rows hold what
follows from the recipes alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fathoms
from fathoms.bench.race import Setting, seconds, training_update
from fathoms.data import Batch
from fathoms.models.vit import ViT
from fathoms.models.zoo import model_config
from fathoms.train.distributed import shard
from fathoms.train.job import Job
from fathoms.train.precision.gradient_buckets import GradientBuckets
from fathoms.train.precision.sharded_masters import ShardedMasters, replica_of
from fathoms.train.precision.speed import compile_scope
from fathoms.train.recipe.files import read_recipe, recipe_options
from fathoms.train.recipe.recipe import Recipe
from result_rows import load_report, save_report

RESULTS = Path(__file__).parents[1] / "results" / "many_gpus"
RECIPES = ("learnable_scaler_300", "cait_400", "deit3_800", "rsb_a2", "vit5")
GPUS = 8
IMAGENET = 1_281_167
# Bytes a second that a GPU sends and receives at once: NVLink 4 inside a node; one port of InfiniBand NDR for each GPU.
LINKS = {"NVLink": 450e9, "InfiniBand": 50e9}
REACHED = 0.8
"""The share of a link's rate that a collective reaches."""


def load(name: str) -> tuple[Recipe, dict[str, Any]]:
    """A recipe and the options of its model."""
    table = read_recipe(name)
    return Recipe.join(recipe_options(table, name), {}), dict(table["model"])


def computed(name: str) -> dict[str, Any]:
    """Numbers that follow from a recipe: its model, parameters, epochs and the bytes that each GPU exchanges."""
    recipe, options = load(name)
    with torch.device("meta"):
        model = ViT(model_config(options.pop("name"), **options))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Reduce and gather float32, an all-reduce of a ring or under --fsdp its two halves.
    exchanged = 2 * (GPUS - 1) / GPUS * 4 * parameters
    return {
        "model": load(name)[1]["name"],
        "parameters": parameters,
        "epochs": recipe.epochs,
        "global_batch": recipe.batch_size * recipe.grad_accum_steps,
        "batch": max(1, recipe.batch_size * recipe.grad_accum_steps // GPUS),
        "images": IMAGENET,
        "gpus": GPUS,
        "exchanged_bytes": exchanged,
        "exchange_ms": {link: 1e3 * exchanged / (rate * REACHED) for link, rate in LINKS.items()},
        "assumed": {**LINKS, "reached": REACHED},
    }


def measure(name: str, batch: int, device: torch.device, tiny: bool) -> dict[str, Any]:
    """The update of a recipe on this GPU, and the exchange on one rank."""
    recipe, options = load(name)
    small = {"depth": 2, "image_size": 32, "num_classes": 10} if tiny else {}
    model = fathoms.create_model(options.pop("name"), **{**options, **small}).to(device)
    size, classes = model.config.image_size, model.config.num_classes
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, classes, (batch,), device=device)
    targets = None
    if recipe.bce_loss:
        targets = torch.nn.functional.one_hot(labels, classes).float()
    own = recipe.replace(grad_accum_steps=1, grad_checkpointing=False)
    scope, _ = compile_scope(Job(None, name, model.config, own))
    setting = Setting(compile=scope) if device.type == "cuda" else Setting("bf16", "none", "eager")
    update = training_update(model, setting, device, recipe=own)
    one = Batch(images, labels, torch.arange(batch), epoch=0, number=0, targets=targets)
    for _ in range(6):
        update(one)
    return {
        "compiled": setting.compile,
        "update_ms": _ms(lambda: update(one), device),
        **exchange(model, device),
    }


def _ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call, the median of turns, since the host has other work too."""
    turns, times = (7, 4) if device.type == "cuda" else (1, 1)
    return 1e3 * statistics.median(seconds(run, times) for _ in range(turns))


def exchange(model: torch.nn.Module, device: torch.device) -> dict[str, float]:
    """Milliseconds of the calls that exchange gradients and weights, with one rank."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    buckets = GradientBuckets(model, ranks=1)
    flat = _ms(buckets.reduce, device)
    replica = replica_of(model)
    for parameter in model.parameters():
        parameter.grad = None
    shard(model, free_root=True)
    masters = ShardedMasters(model, replica, ranks=1)
    gradients = [torch.zeros_like(parameter) for parameter in replica.parameters()]

    def both() -> None:
        for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
            parameter.grad = gradient
        masters.reduce()
        masters.gather()

    return {"reduce_ms": flat, "scatter_gather_ms": _ms(both, device)}


def main() -> None:
    """Compute each row, and measure where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="measure on this machine's device too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and batches, to try the script")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--output", type=Path, default=RESULTS, help="OUTPUT.json")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    if arguments.measure and cuda and not torch.cuda.is_available():
        parser.error("--measure: no CUDA device; leave it out to compute alone")
    report = load_report(arguments.output)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.measure:
            store = dist.FileStore(f"{folder}/store", 1)
            dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
        for name in arguments.recipes:
            began = time.perf_counter()
            kept = report["rows"].get(name, {}).get("measured")
            row = computed(name)
            if arguments.measure:
                device = torch.device(arguments.device, 0) if cuda else torch.device("cpu")
                where = {
                    "device": torch.cuda.get_device_name() if cuda else "cpu",
                    "torch": torch.__version__,
                }
                batch = 4 if arguments.tiny else row["batch"]
                kept = {**where, "batch": batch, **measure(name, batch, device, arguments.tiny)}
                torch.compiler.reset()
                gc.collect()
            report["rows"][name] = {**row, "measured": kept}
            save_report(report, arguments.output)
            print(f"{name}: {report['rows'][name]} [{time.perf_counter() - began:.0f} s]", flush=True)
        if arguments.measure:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
