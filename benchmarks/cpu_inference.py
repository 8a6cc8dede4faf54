"""Inference on a CPU: torch, onnxruntime and OpenVINO in float32 and int8, beside timm's eager model in the same run.

    python benchmarks/cpu_inference.py photos/                       # random weights, and the table says so
    python benchmarks/cpu_inference.py cifar10.npz --run runs/NAME   # a trained model too

DATA has a held-out split, on which files are compared with the model, and training images, which calibrate int8.
Runners take turns at batches of 1 and 8 with one and with all threads; a ratio is the geometric mean of the four.
Writes results/cpu_inference.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fathoms.cli.export import judge
from fathoms.cli.targets import training_split
from fathoms.errors import FathomsError
from fathoms.evaluating.load import LoadedModel, load_run, new_model
from fathoms.exporting.fastest import Run, measure, ratio
from fathoms.files import write_atomic
from fathoms.models.build_timm import build_timm
from fathoms.surgery.fold import fold
from fathoms.surgery.inputs import example_images

MODELS = {
    "vit_tiny_patch16_224": "vit_tiny_patch16_224",
    "vit_small_patch16_224": "vit_small_patch16_224",
    "deit3_small_patch16_224": "deit3_small_patch16_224",
    "cait_xxs24_224": "cait_xxs24_224",
    "vit_scaler_192x12_16": "vit_tiny_patch16_224",
}
"""Models and timm's model of the same sizes; LearnableScaler's is folded first."""
TIMM = "timm, eager"
RESULTS = Path(__file__).parents[1] / "results"


def rows_of(loaded: LoadedModel, theirs: nn.Module, data: str, folded: bool) -> list[dict[str, Any]]:
    """Every way to run a model, with its time over that of timm's eager model."""
    model = fold(loaded.model)[0] if folded else loaded.model

    def beside(_threads: int) -> Mapping[str, Run]:
        # Compiled code keeps the number of threads that it was compiled for.
        torch._dynamo.reset()
        return {"torch.compile": torch.compile(model, dynamic=False), TIMM: theirs}

    images = judge(SimpleNamespace(max_drop=100.0, calibrate=data), loaded, data)
    with tempfile.TemporaryDirectory() as folder:
        tried, _ = measure(model, Path(folder), "model", images, folds=(False,), beside=beside)
    source = next(row.ms for row in tried if row.name == TIMM)
    return [
        {
            **asdict(row),
            "name": row.name.replace("model", "torch, eager"),
            "times_timm": ratio(source, row.ms),
        }
        if row.ms
        else {"name": row.name, "problem": row.problem}
        for row in tried
    ]


def table(found: dict[str, Any]) -> str:
    """The page: a table of each model."""
    lines = [
        "# Inference on a CPU",
        "",
        f"`{found['command']}` on {found['cpu']}, {found['threads']} threads, torch {found['torch']}.",
        'Milliseconds of a batch by batch x threads; "times timm" is the geometric mean of the ratios to timm\'s eager',
        "model in the same run. Agreement is that of the likeliest class with the model in torch, on "
        f"{found['images']} images of {found['data']}.",
    ]
    for name, model in found["models"].items():
        keys = list(next(row["ms"] for row in model["rows"] if row.get("ms")))
        lines += ["", f"## {name}: {model['weights']} weights", ""]
        head = ["", *(f"{key}, ms" for key in keys), "times timm", "agreement", "MB"]
        cells = [
            [row["name"], *(f"{row['ms'][key]:.3g}" for key in keys), f"{row['times_timm']:.2f}"]
            + ([f"{row['agreement']:.1f} %", f"{row['bytes'] / 1e6:.3g}"] if row["bytes"] else ["", ""])
            for row in model["rows"]
            if row.get("ms")
        ]
        lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]
        lines += [f"\n{row['name']}: {row['problem']}" for row in model["rows"] if row.get("problem")]
    return "\n".join([*lines, ""])


def cpu() -> str:
    """The name of the processor."""
    rows = Path("/proc/cpuinfo").read_text().splitlines()
    return next((row.partition(": ")[2] for row in rows if row.startswith("model name")), "an unnamed CPU")


def main() -> int:
    """Measure the models, and write the page after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="labelled images")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--run", nargs="*", default=[], help="runs of trained models, beside those by name")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_inference.json")
    arguments = parser.parse_args()
    classes = len(training_split(arguments.data).classes)
    makers: dict[str, tuple[str, Callable[[], LoadedModel]]] = {
        name: ("random", lambda name=name: new_model(name, num_classes=classes)) for name in arguments.models
    }
    makers |= {Path(run).name: ("trained", lambda run=run: load_run(run)) for run in arguments.run}
    found: dict[str, Any] = {
        "command": f"python benchmarks/cpu_inference.py {Path(arguments.data).name}",
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "data": Path(arguments.data).name,
        "models": {},
    }
    for name, (weights, make) in makers.items():
        loaded = make()
        images = judge(SimpleNamespace(max_drop=None, calibrate=None), loaded, arguments.data).batches()
        found["images"] = sum(len(batch.labels) for batch in images)
        try:
            theirs = timms(name, loaded, classes)
        except FathomsError as error:
            parser.error(f"{name}: {error}")
        rows = rows_of(
            loaded, theirs, arguments.data, loaded.config is not None and "scaler" in loaded.config.norm
        )
        found["models"][name] = {"weights": weights, "rows": rows}
        write_atomic(arguments.out, (json.dumps(found, indent=1) + "\n").encode())
        write_atomic(arguments.out.with_suffix(".md"), table(found).encode())
        print(f"{name}: done", file=sys.stderr)
    print(json.dumps({"written": str(arguments.out)}))
    return 0


def timms(name: str, loaded: LoadedModel, classes: int) -> nn.Module:
    """The model of timm of the same sizes; of a trained model a plain ViT of its width, depth and patches."""
    if name in MODELS:
        return build_timm(f"timm/{MODELS[name]}", classes).eval()
    from timm.models.vision_transformer import VisionTransformer

    config = loaded.config
    assert config is not None
    shape = {"img_size": config.image_size, "patch_size": config.patch_size, "in_chans": config.in_channels}
    sizes = {"embed_dim": config.dim, "depth": config.depth, "num_heads": config.heads}
    model = VisionTransformer(**shape, **sizes, mlp_ratio=config.mlp_ratio, num_classes=classes).eval()
    model(example_images(loaded.model, 1))
    return model


if __name__ == "__main__":
    sys.exit(main())
