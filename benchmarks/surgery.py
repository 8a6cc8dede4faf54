"""Swap, fold and export of models from timm, torchvision and transformers; accuracy kept by calibration.

    python benchmarks/surgery.py

writes results/surgery.json and results/surgery.md, and the tables in docs/surgery.md. The first table has a row
for each peer model with random weights, small images and, where named, fewer blocks: norms found, parts folded,
the largest difference of the output, the time of a forward pass before and after folding, and the difference of
the folded model in onnxruntime. The second trains a LayerNorm ViT on scikit-learn's digits, swaps its norms in each
way and fine-tunes it. One thread; times are the best of several passes taken in turn, and depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from fathoms import create_model, norms
from fathoms.data.sources.arrays import digits
from fathoms.errors import FathomsError
from fathoms.evaluating.onnx_model import OnnxModel
from fathoms.exporting.verified_export import write_onnx
from fathoms.surgery.fold import fold
from fathoms.surgery.inputs import difference, example_images, run
from fathoms.surgery.swap import swap_norms

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "surgery.md"
# This script writes what is between these two lines of the page.
MARKS = ("<!-- written by benchmarks/surgery.py -->", "<!-- end -->")
SEEDS = (0, 1, 2)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=100, **options)


def _transformers(model: str, config: str) -> Callable[[], nn.Module]:
    sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}
    options = {**sizes, "image_size": 64, "patch_size": 16, "num_labels": 100}
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


def _scaler_resnet() -> nn.Module:
    """A ResNet whose frozen BatchNorms have become scalers."""
    model = torchvision.models.resnet18(num_classes=100).eval()
    swap_norms(model, "learnable_scaler")
    model.image_size = 64  # pyrefly: ignore
    return model


PEERS: dict[str, Callable[[], nn.Module]] = {
    "fathoms vit_scaler_192x24_16": lambda: create_model(
        "vit_scaler_192x24_16", image_size=64, num_classes=100
    ),
    "fathoms vit_ti16_dpn_224": lambda: create_model("vit_ti16_dpn_224", image_size=64, num_classes=100),
    "timm vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=64),
    "timm deit_tiny_distilled_patch16_224": _timm("deit_tiny_distilled_patch16_224", img_size=64),
    "timm deit3_small_patch16_224": _timm("deit3_small_patch16_224", img_size=64),
    "timm cait_xxs24_224": _timm("cait_xxs24_224", img_size=64),
    "timm eva02_tiny_patch14_224": _timm("eva02_tiny_patch14_224", img_size=56),
    "timm beit_base_patch16_224, 3 blocks": _timm("beit_base_patch16_224", img_size=64, depth=3),
    "timm vit_small_patch14_dinov2": _timm("vit_small_patch14_dinov2", img_size=56),
    "timm vit_small_patch16_dinov3": _timm("vit_small_patch16_dinov3", img_size=64),
    "timm vit_base_patch16_siglip_224, 3 blocks": _timm("vit_base_patch16_siglip_224", img_size=64, depth=3),
    "timm swin_tiny_patch4_window7_224": _timm("swin_tiny_patch4_window7_224", img_size=56),
    "timm convnext_atto": _timm("convnext_atto"),
    "torchvision vit, 6 blocks of 192": lambda: torchvision.models.VisionTransformer(64, 16, 6, 3, 192, 768),
    "torchvision resnet18, BatchNorm swapped": _scaler_resnet,
    "transformers ViT, 6 blocks of 192": _transformers("ViTForImageClassification", "ViTConfig"),
    "transformers DINOv2, 6 blocks of 192": _transformers("Dinov2ForImageClassification", "Dinov2Config"),
}


def moved(model: nn.Module) -> nn.Module:
    """A model with noise on its parameters: ones and zeros would make folding trivial."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


def milliseconds(models: list[nn.Module], images: Tensor, passes: int = 25) -> list[float]:
    """The best time of each model's forward pass, measured in turn so that all see the same load."""
    best = [float("inf")] * len(models)
    for _ in range(passes):
        for index, model in enumerate(models):
            start = time.perf_counter()
            run(model, images)
            best[index] = min(best[index], 1e3 * (time.perf_counter() - start))
    return best


def onnx_difference(model: nn.Module, folded: nn.Module) -> float | str:
    """The folded model in onnxruntime against the original in torch, at batch 1 and 5."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            write_onnx(folded, path)
            session = OnnxModel(path)
            batches = [example_images(model, batch, seed=batch) for batch in (1, 5)]
            return max(difference(run(model, images), session.outputs(images)) for images in batches)
        except FathomsError:
            with contextlib.suppress(FathomsError):
                write_onnx(model, path)
                return "only the original can be written"
            return "torch writes neither it nor the original"


def peer(name: str) -> dict[str, Any]:
    """One row of the first table."""
    torch.manual_seed(0)
    model = moved(PEERS[name]())
    if name == "timm convnext_atto":
        model.img_size = 64  # pyrefly: ignore
    sites = len(norms(model))
    folded, report = fold(model)
    # The copy is the same model: the difference of the two times is the noise of the machine.
    times = milliseconds([model, copy.deepcopy(model), folded], example_images(model, 4))
    return {
        "model": name,
        "norms": sites,
        "folded": len(report),
        "left": [list(pair) for pair in report.left],
        "parameters": list(report.parameters),
        "operations": report.operations,
        "difference": report.difference,
        "ms": times,
        "onnx": onnx_difference(model, folded),
    }


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """Plain AdamW."""
    optimiser = torch.optim.AdamW(model.parameters(), rate)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(100):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def trained(seed: int) -> list[dict[str, Any]]:
    """Accuracy on held-out digits: trained with LayerNorm, right after each swap, after 1 and 5 more epochs."""
    torch.manual_seed(seed)
    images, labels = digits()
    order = torch.randperm(len(images))
    fit, held = order[:1400], order[1400:]

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        return 100 * (model(images[held]).argmax(1) == labels[held]).float().mean().item()

    teacher = create_model("vit_digits", depth=6, num_classes=10, mlp_ratio=2.0)
    train(teacher, images[fit], labels[fit], 15, 2e-3)
    rows = []
    for to in ("learnable_scaler", "dyt"):
        for how in ("reset", "keep", "calibrate"):
            model = copy.deepcopy(teacher)
            swap_norms(model, to, how=how, calibrate=images[fit[:500]])
            row = {
                "seed": seed,
                "to": to,
                "how": how,
                "before": accuracy(teacher),
                "swapped": accuracy(model),
            }
            train(model, images[fit], labels[fit], 1, 5e-4)
            row["after 1"] = accuracy(model)
            train(model, images[fit], labels[fit], 4, 5e-4)
            row["after 5"] = accuracy(model)
            rows.append(row)
    return rows


def peer_table(rows: list[dict[str, Any]]) -> list[str]:
    """The first table as Markdown."""
    columns = ["model", "norms", "folded", "left", "parameters saved", "operations saved", "difference"]
    columns += ["ms before", "ms of a copy", "ms after", "ONNX"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        onnx = row["onnx"] if isinstance(row["onnx"], str) else f"{row['onnx']:.1e}"
        saved = row["parameters"][0] - row["parameters"][1]
        lines.append(
            f"| {row['model']} | {row['norms']} | {row['folded']} | {len(row['left'])} | {saved} | "
            f"{row['operations']} | {row['difference']:.1e} | {' | '.join(f'{ms:.1f}' for ms in row['ms'])} | {onnx} |"
        )
    return lines


def trained_table(rows: list[dict[str, Any]]) -> list[str]:
    """The second table as Markdown: mean and range over the seeds."""
    columns = ("before", "swapped", "after 1", "after 5")
    lines = [f"| to | how | {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for to, how in dict.fromkeys((row["to"], row["how"]) for row in rows):
        cells = []
        for column in columns:
            values = [row[column] for row in rows if (row["to"], row["how"]) == (to, how)]
            cells.append(f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        lines.append(f"| {to} | {how} | {' | '.join(cells)} |")
    return lines


def write(peers: list[dict[str, Any]], digit_rows: list[dict[str, Any]]) -> None:
    """Both files of results, and their tables on the page."""
    versions = {m.__name__: m.__version__ for m in (torch, timm, torchvision, transformers)}
    data = {
        "command": "python benchmarks/surgery.py",
        "versions": versions,
        "peers": peers,
        "digits": digit_rows,
    }
    (RESULTS / "surgery.json").write_text(json.dumps(data, indent=1) + "\n")
    text = [
        "Random weights moved off their start, 56 or 64 pixel images, batch 4, one thread, best of 25 passes "
        "taken in turn; the copy is the model again, so its time shows the noise of the machine. "
        "Differences are of the output over its largest value, float32; ONNX is the folded model in onnxruntime "
        "against the original in torch, at batch 1 and 5.",
        "",
        *peer_table(peers),
        "",
        "A LayerNorm ViT trained on scikit-learn's digits (6 blocks of 64, 15 epochs), its norms swapped, then "
        f"fine-tuned. Percent right of 397 held-out digits, mean and range over seeds {SEEDS}.",
        "",
        *trained_table(digit_rows),
        "",
    ]
    head = ["# Surgery on other people's models", ""]
    head += ["`python benchmarks/surgery.py`; reasons for every part left are in `surgery.json`.", ""]
    (RESULTS / "surgery.md").write_text("\n".join([*head, *text]))
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text("\n".join([f"{before}{MARKS[0]}", "", *text, f"{MARKS[1]}{after}"]))


def main() -> None:
    """Measure everything, write both files, print each row and at the end one JSON object."""
    torch.set_num_threads(1)
    peers = []
    for name in PEERS:
        peers.append(peer(name))
        print(peer_table(peers)[-1], flush=True)
    write(peers, [row for seed in SEEDS for row in trained(seed)])
    print(json.dumps({"peers": len(peers), "worst": max(row["difference"] for row in peers)}))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
