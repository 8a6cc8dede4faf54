"""Golden losses: 20 updates of five recipes on fixed images, through the command line alone.

    python tests/golden/losses.py                  # train all five and compare with losses.json
    python tests/golden/losses.py --against HEAD~1 # bit for bit the same as another commit, on this machine
    python tests/golden/losses.py --write          # store new losses, when a change is meant to move them
    python tests/golden/losses.py --device cuda    # the fast path: Triton kernels, compiled blocks, CUDA graph

Nothing here imports more of the package than its command, so that the file runs on any commit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
UPDATES = 20
COMMON = (
    # Without a model the data and the machine would choose one.
    *("--model", "vit_small_patch16_224"),
    *("--image-size", "32", "--patch-size", "8", "--depth", "4", "--dim", "48", "--heads", "4"),
    *("--epochs", str(UPDATES), "--batch-size", "64", "--eval-interval", str(UPDATES), "--seed", "7"),
    *("--crop", "pad", "--crop-pct", "1.0", "--lr", "2e-3"),
    *("--mean", "0.485", "0.456", "0.406", "--std", "0.229", "0.224", "0.225"),
)
SCALER = ("--norm", "learnable_scaler", "--train-feature-decay", "0.1", "--attn-extra-loss", "0.03")
CAIT = ("--readout", "class_attention", "--attention", "talking_heads", "--residual", "layerscale")
RUNS = {
    "plain": (),
    "cait": (*CAIT, "--drop-path", "0.1", "--drop-path-schedule", "uniform"),
    "scaler_penalties": (*SCALER, "--attn-extra-loss-layers", "2"),
    "lamb_mixup_cutmix": ("--opt", "lamb", "--mixup", "0.2", "--cutmix", "1.0", "--aa", "rand-m7-mstd0.5"),
    "muon_ema_bf16": ("--opt", "muon", "--model-ema", "--model-ema-decay", "0.9", "--precision", "bf16"),
}
"""One update an epoch, so that each row of metrics.jsonl is the loss of one update."""
FAST = ("--torchcompile", "inductor", "--precision", "bf16")
# The penalties look into the blocks, so the whole model would be compiled; the graph and the kernels stay.
FAST_BY_RUN = {"scaler_penalties": ("--precision", "bf16")}


def write_images(path: Path) -> None:
    """64 training and 32 validation images in four classes of different colour and texture."""
    rng = np.random.default_rng(2024)
    arrays = {}
    for split, count in (("train", 64), ("val", 32)):
        labels = np.arange(count) % 4
        waves = np.sin(np.arange(32)[None, :] * (1 + labels[:, None]) / 3.0)[:, :, None, None]
        noise = rng.normal(0, 40, (count, 32, 32, 3))
        arrays[f"x_{split}"] = np.clip(128 + 60 * waves + noise, 0, 255).astype(np.uint8)
        arrays[f"y_{split}"] = labels
    np.savez(path, **arrays)


def train(name: str, device: str, folder: Path) -> dict[str, object]:
    """The losses of one run, and a fingerprint of every tensor that it saved."""
    from fathoms.cli.main import main

    data = folder / "images.npz"
    if not data.is_file():
        write_images(data)
    fast = FAST_BY_RUN.get(name, FAST) if device == "cuda" else ()
    precision = RUNS[name] if device != "cuda" else _without(RUNS[name], "--precision")
    words = ["train", str(data), *COMMON, *precision, *fast, "--device", device]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        code = main([*words, "--output", str(folder), "--experiment", name])
    if code:
        raise SystemExit(f"{name}: exit {code}\n{printed.getvalue()}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    digest = hashlib.sha256()
    for file in sorted((folder / name / "checkpoints" / "last").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return {"losses": losses, "tensors": digest.hexdigest()}


def _without(words: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """The words without a flag and its value."""
    if flag not in words:
        return words
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


def train_all(device: str) -> dict[str, dict[str, object]]:
    """Every run, in a folder that is then removed."""
    import torch

    # Sums in one order, whatever the machine has.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {name: train(name, device, Path(folder)) for name in RUNS}


def train_with(source: Path, device: str) -> dict[str, dict[str, object]]:
    """Every run with the package in `source`, driven by this file, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--print", "--device", device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr or done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def train_at(revision: str, device: str) -> dict[str, dict[str, object]]:
    """Every run with the package as it is at a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = str(Path(folder) / "tree")
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=HERE, check=True
        )
        try:
            return train_with(Path(tree) / "src", device)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=HERE, check=True)


def stored(device: str) -> Path:
    """The file of a device's golden losses."""
    return HERE / ("losses.json" if device == "cpu" else f"losses_{device}.json")


def tolerance(name: str) -> float:
    """How far losses may move between CPUs and versions of torch, relative; about ten times what was seen."""
    return 1e-2 if "bf16" in name else 1e-3


def farthest(ours: list[float], golden: list[float]) -> float:
    """The largest relative difference of two lists of losses; infinite where one is longer."""
    if len(ours) != len(golden):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(ours, golden, strict=True))


def main() -> int:
    """Compare, print or store; 1 if something moved."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", metavar="REV", help="compare bit for bit with this commit")
    parser.add_argument("--write", action="store_true", help="store the losses as the golden ones")
    parser.add_argument("--print", action="store_true", help="print them as one JSON object")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.against:
        ours, theirs = train_with(HERE.parents[1] / "src", args.device), train_at(args.against, args.device)
        moved = [name for name in RUNS if ours[name] != theirs[name]]
        print(f"moved since {args.against}: {', '.join(moved)}" if moved else f"bit-equal to {args.against}")
        return bool(moved)
    ours = train_all(args.device)
    if args.print:
        print(json.dumps(ours))
        return 0
    if args.write:
        losses = {name: run["losses"] for name, run in ours.items()}
        stored(args.device).write_text(json.dumps(losses, indent=1) + "\n")
        return 0
    golden = json.loads(stored(args.device).read_text())
    for name, run in ours.items():
        print(f"{name:<20} farthest from the golden losses: {farthest(run['losses'], golden[name]):.1e}")
    return any(farthest(run["losses"], golden[name]) > tolerance(name) for name, run in ours.items())


if __name__ == "__main__":
    sys.exit(main())
