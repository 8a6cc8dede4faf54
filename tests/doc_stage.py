"""A folder in which the commands of the pages run: every name that they use, on tiny data.

The photographs are pieces of the two that come with scikit-learn, the arrays its handwritten digits.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

FOLDERS = ("images", "photos", "imagenet", "DATA", "MY_PHOTOS")
"""Names of a folder of photos on the pages."""
TINY_RUN = (
    "--recipe cifar --image-size 32 --depth 2 --dim 32 --heads 2 --epochs 1 --warmup-epochs 0 --device cpu"
)
TINY_ARMS = "--axis norm=layernorm,dyt --seeds 2 --epochs 1 --warmup-epochs 0 --depth 1 --device cpu"

SMALLER = {
    "train": "--epochs 1 --warmup-epochs 0",
    "compare": "--epochs 1 --warmup-epochs 0 --seeds 2 --device cpu",
    "bench": "--batch-size 2 --turns 1 --steps 1 --device cpu --compile none",
    "probe": "--batch-size 4",
}
"""Flags that make a command of a page short; they follow its own, and the last one counts."""

PRELUDE = """
import fathoms, timm, torch
torch.manual_seed(0)
images, labels = torch.randn(2, 3, 224, 224), torch.arange(2)
batches = loader = [images[:1]]
small = dict(image_size=224, patch_size=32, dim=32, heads=2, num_classes=10)
build = lambda depth: fathoms.ViT(fathoms.ViTConfig(depth=depth, **small))
model = timm.create_model(
    "vit_tiny_patch16_224", patch_size=32, embed_dim=288, depth=2, num_heads=4, num_classes=10
).eval()
cait = fathoms.ViT(fathoms.ViTConfig(depth=2, attention="talking_heads", readout="class_attention", **small))
make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
"""Names that Python on the pages takes for granted: a small model of timm and a batch."""


def photographs(folder: Path, size: int = 48) -> None:
    """Pieces of two photographs as train/CLASS and val/CLASS."""
    rng = np.random.default_rng(0)
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for split, count in (("train", 12), ("val", 4)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                top, left = (int(rng.integers(side - size)) for side in pixels.shape[:2])
                piece = Image.fromarray(pixels[top : top + size, left : left + size])
                piece.save(folder / split / name / f"{number}.jpg", quality=90)


def arrays(path: Path) -> None:
    """Some of the handwritten digits as ten classes of 32 x 32 pixels, under CIFAR's names."""
    found = load_digits()
    grey = np.kron(found.images[:160] * 15.9, np.ones((4, 4))).astype(np.uint8)
    pixels, labels = grey[..., None].repeat(3, -1), found.target[:160]
    np.savez(path, x_train=pixels[:120], y_train=labels[:120], x_test=pixels[120:], y_test=labels[120:])


def set_up(folder: Path, pages: str) -> None:
    """Write everything that pages name into an empty folder; a run and a comparison only if their text has them."""
    photographs(folder / FOLDERS[0])
    for name in FOLDERS[1:]:
        shutil.copytree(folder / FOLDERS[0], folder / name)
    shutil.copy(folder / "images/val/flower/0.jpg", folder / "kitten.jpg")
    arrays(folder / "cifar10.npz")
    shutil.copy(folder / "cifar10.npz", folder / "cifar100.npz")
    for name in ("S24_224.pth", "checkpoint.pth"):
        torch.save({"model": {"weight": torch.ones(2, 2)}}, folder / name)
    for name, command in (
        ("NAME", f"train images --experiment NAME {TINY_RUN}"),
        ("COMPARISON", f"compare --experiment COMPARISON {TINY_ARMS}"),
    ):
        if f"runs/{name}" not in pages:
            continue
        words = [sys.executable, "-m", "fathoms", *command.split()]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    programs = folder / "bin"
    programs.mkdir()
    for name, words in {"fathoms": f"{sys.executable} -m fathoms", "python": sys.executable}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (programs / name).chmod(0o755)


def made_small(command: str) -> str:
    """A command with the flags that make it short, unless a shell operator follows or it sets epochs by itself."""
    found = re.match(r"fathoms (\w+)", command)
    if (
        found is None
        or found[1] not in SMALLER
        or re.search(r"[|;&>]|--(dry-run|progressive-size|help)", command)
    ):
        return command
    extra = SMALLER[found[1]]
    if found[1] == "probe" and re.search(r"--(coordinates|depths)", command):
        extra = ""
    return f"{command} {extra}".strip()
