"""Fault injection: the same faults in fathoms and in timm, and what is left of each run.

    python benchmarks/faults_beside_timm.py --write results/faults

fathoms is run by its command, in a process of its own. timm's training script, train.py, is in neither its wheel nor
its source archive, so it is not run here; what the package does hold is: CheckpointSaver, resume_checkpoint, the data
set, the loader, the models. Each cell of timm's column names the pieces it was measured with. Where a fault needs a
training loop, the loop is the shortest one around those pieces (`timm_loop` below); where that would say nothing of
timm, the cell says so.

Writes PATH.md and PATH.json, and prints the JSON object on the last line.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_dataset, create_loader
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, random_seed

import fathoms
from fathoms.models.zoo import model_config

sys.path.insert(0, str(Path(__file__).parent))
from soak import fault, soak

MODEL = [
    "--model",
    "vit_tiny_patch16_224",
    "--image-size",
    "32",
    "--dim",
    "32",
    "--heads",
    "4",
    "--depth",
    "3",
]
RUN = [*MODEL, "--batch-size", "20", "--epochs", "3", "--lr", "0.001", "--device", "cpu", "--workers", "1"]
KILLS = 8
NOT_RUN = "not measured: decided in train.py, which the package does not hold"

Row = dict[str, str]


def photos(root: Path, count: int = 120) -> Path:
    """Write a small image folder of two classes."""
    rng = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 20)):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
        for index in range(number):
            image = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
            image.save(root / split / "ab"[index % 2] / f"{index:03d}.jpg")
    return root


def train(
    data: Path, base: Path, name: str, *words: str, epochs: str = "3"
) -> subprocess.CompletedProcess[str]:
    """`fathoms train` in a separate process."""
    command = [sys.executable, "-m", "fathoms", "train", str(data), *RUN, "--epochs", epochs]
    command += ["--output", str(base), "--experiment", name, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def summary(base: Path, name: str) -> dict[str, Any]:
    """The summary of a run."""
    return json.loads((base / name / "summary.json").read_text())


def non_finite(tensors: dict[str, torch.Tensor]) -> str:
    """Number of tensors that are not finite."""
    return f"{sum(not bool(value.isfinite().all()) for value in tensors.values())} of {len(tensors)}"


def timm_parts(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, CheckpointSaver]:
    """A small timm model with its optimizer and saver."""
    shape = {
        "img_size": 32,
        "patch_size": 16,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 4,
        "drop_path_rate": 0.1,
    }
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, **shape)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    folder.mkdir(exist_ok=True)
    return (
        model,
        optimizer,
        CheckpointSaver(model, optimizer, checkpoint_dir=str(folder), recovery_dir=str(folder)),
    )


def timm_loop(data: Path, folder: Path, epochs: range, resume: str = "") -> dict[str, torch.Tensor]:
    """The shortest training around timm's loader, model, optimizer and saver; seeded as train.py's default is."""
    random_seed(42, 0)
    model, optimizer, saver = timm_parts(folder)
    first = epochs.start
    if resume:
        first = resume_checkpoint(model, resume, optimizer, log_info=False, weights_only=False) or 0
    dataset = create_dataset("", root=str(data), split="train", is_training=True)
    loader = create_loader(
        dataset,
        (3, 32, 32),
        20,
        is_training=True,
        use_prefetcher=False,
        num_workers=0,
        re_prob=0.3,
        hflip=0.5,
    )
    for epoch in range(first, epochs.stop):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model.train()(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        saver.save_checkpoint(epoch, metric=float(epoch))
    return model.state_dict()


def nan_from_the_first_step(data: Path, base: Path) -> Row:
    """Weights that are NaN before the first update."""
    config = model_config("vit_tiny_patch16_224").replace(
        image_size=32, dim=32, heads=4, depth=3, num_classes=2
    )
    weights = dict(fathoms.ViT(config).named_parameters())
    bad = {
        name: torch.full_like(value, torch.nan) if "head" in name else value
        for name, value in weights.items()
    }
    save_file({name: value.detach().contiguous() for name, value in bad.items()}, base / "nan.safetensors")
    done = train(data, base, "nan", "--initial-checkpoint", str(base / "nan.safetensors"))
    best = (base / "nan" / "checkpoints" / "best").exists()
    model, _, saver = timm_parts(base / "timm-nan")
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)  # pyrefly: ignore
    saver.save_checkpoint(0, metric=50.0)
    kept = torch.load(base / "timm-nan" / "model_best.pth.tar", weights_only=False)["state_dict"]
    return {
        "fault": "not a number from the first step",
        "fathoms": f"exit {done.returncode}, status {summary(base, 'nan')['status']}, "
        f"{'a' if best else 'no'} best checkpoint",
        "timm": f"saves it as model_best with {non_finite(kept)} tensors not finite",
        "timm measured with": "CheckpointSaver (the exit code is train.py's)",
    }


def resume_in_the_middle(base: Path) -> tuple[Row, Row]:
    """Kill in the middle of an epoch, and while a checkpoint is being written."""
    (base / "soak").mkdir()
    report = soak(KILLS, 0, "fork", base / "soak")
    _, _, saver = timm_parts(base / "timm-middle")
    saver.save_recovery(3, batch_idx=5)
    model, optimizer, _ = timm_parts(base / "timm-again")
    start = resume_checkpoint(model, saver.curr_recovery_file, optimizer, log_info=False, weights_only=False)
    middle = {
        "fault": "resumed in the middle of an epoch",
        "fathoms": f"resumes at the batch; after {report['kills']} kills equal bit for bit: "
        f"{report['equal bit for bit']}",
        "timm": f"saved at batch 5 of epoch 3, starts at epoch {start}: the rest of epoch 3 is left out",
        "timm measured with": "CheckpointSaver.save_recovery, resume_checkpoint",
    }
    unusable, cut = kill_timm_while_saving(base / "timm-kill", KILLS)
    during = {
        "fault": "SIGKILL while a checkpoint is written",
        "fathoms": f"{report['unusable checkpoints']} unusable of {report['checkpoints verified']} looked at after "
        f"{report['kills']} kills, {report['kills that found a cut-off save']} of them with a cut-off save; "
        "files are flushed and hashed",
        "timm": f"{unusable} of {KILLS} kills left no loadable last.pth.tar ({cut} in a save); not flushed, no hash",
        "timm measured with": "CheckpointSaver in a loop",
    }
    return middle, during


def kill_timm_while_saving(folder: Path, kills: int) -> tuple[int, int]:
    """Kill a process that does nothing but save; how often `last` was unusable, and how often a save was cut off."""
    rng, unusable, cut = random.Random(0), 0, 0
    for number in range(kills):
        shutil.rmtree(folder, ignore_errors=True)
        pid = os.fork()
        if pid == 0:
            model, _, saver = timm_parts(folder)
            for epoch in range(10**6):
                with torch.no_grad():
                    next(model.parameters()).fill_(float(epoch))
                saver.save_checkpoint(epoch, metric=float(epoch))
        while not (folder / "last.pth.tar").exists() or not (folder / "checkpoint-3.pth.tar").exists():
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        cut += (folder / "tmp.pth.tar").exists()
        try:
            torch.load(folder / "last.pth.tar", weights_only=False)
        # Here and below: whatever timm raises is the result.
        except Exception as error:  # noqa: BLE001
            unusable += 1
            print(f"timm, kill {number}: {type(error).__name__}", file=sys.stderr)
    return unusable, cut


def resume_at_a_boundary(data: Path, base: Path) -> Row:
    """Stop after the first of two epochs, and resume."""
    train(data, base, "whole", "--reprob", "0.3", "--drop-path", "0.1", epochs="2")
    words = ("--reprob", "0.3", "--drop-path", "0.1")
    kill_after_first_epoch(data, base, words)
    train(data, base, "cut", *words, epochs="2")
    files = [base / name / "checkpoints" / "last" / "model.safetensors" for name in ("whole", "cut")]
    same = files[0].read_bytes() == files[1].read_bytes()
    whole = timm_loop(data, base / "timm-whole", range(2))
    timm_loop(data, base / "timm-cut", range(1))
    on = timm_loop(data, base / "timm-cut", range(2), resume=str(base / "timm-cut" / "last.pth.tar"))
    keys = sorted(torch.load(base / "timm-cut" / "last.pth.tar", weights_only=False))
    equal = all(torch.equal(value, on[name]) for name, value in whole.items())
    return {
        "fault": "resumed at the end of an epoch",
        "fathoms": f"equal to the undisturbed run bit for bit: {same}",
        "timm": f"equal to the undisturbed run bit for bit: {equal}; its checkpoint holds {', '.join(keys)} and no "
        "state of the random numbers",
        "timm measured with": "a loop of ours around create_loader, CheckpointSaver and resume_checkpoint",
    }


def kill_after_first_epoch(data: Path, base: Path, words: tuple[str, ...]) -> None:
    """SIGKILL once the first epoch's checkpoint exists."""
    command = [sys.executable, "-m", "fathoms", "train", str(data), *RUN, "--epochs", "2", *words]
    command += ["--output", str(base), "--experiment", "cut"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (base / "cut" / "checkpoints" / "last").exists():
        time.sleep(0.002)
    process.kill()
    process.wait()


def sigterm(data: Path, base: Path) -> Row:
    """SIGTERM in the middle of a run, as a scheduler sends it."""
    command = [sys.executable, "-m", "fathoms", "train", str(data), *RUN, "--epochs", "500"]
    command += ["--output", str(base), "--experiment", "term"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (base / "term" / "metrics.jsonl").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=60)
    # This run keeps no average.
    whole = fault(base / "term" / "checkpoints" / "last", ("model", "optimizer"))
    return {
        "fault": "SIGTERM",
        "fathoms": f"exit {code}, status {summary(base, 'term')['status']}, checkpoint whole: {whole is None}",
        "timm": NOT_RUN,
        "timm measured with": "",
    }


def truncated_jpeg(data: Path, base: Path) -> Row:
    """One image of 120 is truncated."""
    broken = base / "broken"
    shutil.copytree(data, broken)
    file = broken / "train" / "a" / "000.jpg"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = train(broken, base, "jpeg", epochs="1")
    named = list(summary(base, "jpeg").get("bad_images", {})) if done.returncode == 0 else []
    dataset = create_dataset("", root=str(broken), split="train", is_training=True)
    loader = create_loader(dataset, (3, 32, 32), 20, is_training=True, use_prefetcher=False, num_workers=0)
    try:
        report = f"{sum(len(labels) for _, labels in loader)} images came through"
    except Exception as error:  # noqa: BLE001
        report = f"the epoch ends with {type(error).__name__}: {str(error)[:60]}; the file is not named"
    return {
        "fault": "a truncated JPEG among 120",
        "fathoms": f"exit {done.returncode}; names {', '.join(named) or 'nothing'} and puts another in its place",
        "timm": report,
        "timm measured with": "create_dataset, create_loader",
    }


def flipped_bit(data: Path, base: Path) -> Row:
    """Flip one bit of the newest checkpoint."""
    train(data, base, "flip", epochs="2")
    file = base / "flip" / "checkpoints" / "last" / "model.safetensors"
    flip(file, 1000)
    done = train(data, base, "flip", epochs="2")
    printed = next((line for line in done.stderr.splitlines() if "damaged" in line), "nothing")
    model, optimizer, saver = timm_parts(base / "timm-flip")
    saver.save_checkpoint(0, metric=1.0)
    path = base / "timm-flip" / "last.pth.tar"
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    place = path.read_bytes().find(kept["blocks.1.mlp.fc1.weight"].numpy().tobytes())
    flip(path, path.stat().st_size - place - 402)
    try:
        resume_checkpoint(model, str(path), optimizer, log_info=False, weights_only=False)
        odd = sum(not torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        report = f"loads without a word; {odd} tensor differs"
    except Exception as error:  # noqa: BLE001
        report = f"refused: {type(error).__name__}"
    reason = printed.partition("damaged ")[2] or printed
    return {
        "fault": "one flipped bit in the newest checkpoint",
        "fathoms": f"skipped with a warning, damaged {reason}; exit {done.returncode}",
        "timm": report,
        "timm measured with": "CheckpointSaver, resume_checkpoint",
    }


def flip(path: Path, from_end: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[-from_end] ^= 1 << 6
    path.write_bytes(bytes(data))


def markdown(rows: list[Row]) -> str:
    """The table, with the command that made it."""
    head = (
        "# The same faults, done to fathoms and to timm\n\n"
        f"Made by `python benchmarks/faults_beside_timm.py --write results/faults`: fathoms {fathoms.__version__}, "
        f"timm {timm.__version__}, torch {torch.__version__}, on a CPU.\n\n"
        "timm's train.py is in neither its wheel nor its source archive and was not run; the last column names the "
        "pieces of the package that each of timm's cells was measured with.\n\n"
        "| fault | fathoms | timm | timm measured with |\n|---|---|---|---|\n"
    )
    lines = ["| " + " | ".join(value.replace("|", "\\|") for value in row.values()) + " |\n" for row in rows]
    return head + "".join(lines)


def main() -> int:
    """Inject every fault into both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="write PATH.md and PATH.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        data = photos(base / "photos")
        # First what forks: torch's threads, once started, would not survive it.
        middle, during = resume_in_the_middle(base)
        rows = [nan_from_the_first_step(data, base), middle]
        rows += [resume_at_a_boundary(data, base), sigterm(data, base), truncated_jpeg(data, base)]
        rows += [flipped_bit(data, base), during]
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if args.write is not None:
        args.write.with_suffix(".md").write_text(markdown(rows))
        args.write.with_suffix(".json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
