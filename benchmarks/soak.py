"""Soak test: kill a training run again and again, and compare its end with the undisturbed run, bit for bit.

    python benchmarks/soak.py --kills 200 --json

The undisturbed run is the plain command `python -m fathoms train …`. The other run has the same command and another
folder; it is killed at random moments of its start, its training and its saves, and started again, until it has been
killed as often as asked; then it may finish. A start takes seconds, most of which go into importing torch. So this
process imports it once and forks: each attempt is still a separate process that knows only the run folder, and SIGKILL
ends it like any other. `--start exec` starts a new interpreter each time instead.

Only the run folder is read. After every kill each checkpoint in it is verified against its manifest by separate code;
at the end the weights, EMA, optimizer, metrics and summary of both runs are compared.

Exit status: 0 everything equal and nothing unusable, 1 otherwise.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

SAVE_EVERY = 2
# An epoch is four updates and two saves.
EPOCHS_PER_KILL = 1


def make_data(path: Path) -> None:
    """Write 128 + 64 small images of four classes, from a seed."""
    rng = np.random.default_rng(0)
    labels = np.arange(192) % 4
    images = rng.integers(0, 160, (192, 16, 16, 3), dtype=np.uint8)
    images[np.arange(192), labels * 4] += 90
    np.savez(path, x_train=images[:128], y_train=labels[:128], x_test=images[128:], y_test=labels[128:])


def command(data: Path, output: Path, name: str, epochs: int) -> list[str]:
    """The command: everything that has a state, and a save every few updates."""
    words = f"train {data} --model vit_tiny_patch16_224 --image-size 16 --patch-size 4 --dim 32 --depth 4 --heads 4"
    words += f" --epochs {epochs} --batch-size 16 --grad-accum-steps 2 --opt adamw --lr 0.001 --device cpu"
    words += " --mixup 0.4 --cutmix 1 --reprob 0.3 --drop-path 0.1 --aug-repeats 2 --model-ema --model-ema-decay 0.9"
    words += f" --residual layerscale --recovery-interval {SAVE_EVERY} --eval-interval 10"
    return [*words.split(), "--output", str(output), "--experiment", name]


def start(words: list[str], how: str, log: Path) -> int:
    """Start an attempt; its process id."""
    if how == "exec":
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "fathoms", *words], stdout=output, stderr=output
            ).pid
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from fathoms.cli.main import main

        code = main(words)
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """The exit status of an attempt that has ended, or None; below zero, the signal that ended it."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def temporary(checkpoints: Path) -> list[str]:
    """Folders of a save in progress, or of one that was cut off."""
    try:
        return [name for name in os.listdir(checkpoints) if name.startswith(".")]  # noqa: PTH208
    except FileNotFoundError:
        return []


def fault(folder: Path, needed: tuple[str, ...] = ("model", "ema", "optimizer")) -> str | None:
    """The reason why a checkpoint is not whole, or None; by separate code, not the trainer's."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if not {"state.json", *(f"{name}.safetensors" for name in needed)} <= set(manifest):
            return f"the manifest lists only {sorted(manifest)}"
        for name, wanted in manifest.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != wanted:
                return f"{name} has another sha256"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def look(checkpoints: Path) -> tuple[int, list[str], int]:
    """Number of checkpoints, their faults, and the updates done by the newest."""
    folders = [path for path in sorted(checkpoints.glob("*")) if not path.name.startswith(".")]
    faults = [f"{folder.name}: {reason}" for folder in folders if (reason := fault(folder)) is not None]
    updates = [json.loads((f / "state.json").read_text())["updates"] for f in folders if fault(f) is None]
    return len(folders), faults, max(updates, default=0)


def updates_in(checkpoints: Path) -> int:
    """Updates done by the newest checkpoint; zero while it is being renamed."""
    try:
        return int(json.loads((checkpoints / "last" / "state.json").read_text())["updates"])
    except (OSError, ValueError):
        return 0


def kill_somewhere(
    pid: int, checkpoints: Path, rng: random.Random, reached: int, budget: float, rate: float
) -> tuple[str, int | None]:
    """Kill an attempt at a random moment or in the middle of a save; how, and its status if it ended by itself.

    Args:
        pid: The attempt.
        checkpoints: Where it saves.
        rng: Decides how and when.
        reached: Updates done by the newest checkpoint before the attempt.
        budget: Updates that it may add, so that the run lasts for all the kills.
        rate: Updates per second.
    """
    began, status, polls = time.monotonic(), None, 0
    wanted = rng.randint(1, max(1, round(budget / SAVE_EVERY)))
    how = rng.choice(("at a random moment", "in a save"))
    moment = began + (rng.random() * (1.0 + budget / rate) if how == "at a random moment" else 120)
    seen, there = 0, bool(temporary(checkpoints))
    while time.monotonic() < moment and (how != "in a save" or seen < wanted) and status is None:
        now = bool(temporary(checkpoints))
        seen, there, polls = seen + (now and not there), now, polls + 1
        if polls % 100 == 0:
            status = ended(pid)
            if updates_in(checkpoints) >= reached + max(budget, SAVE_EVERY):
                break
    if how == "in a save":
        time.sleep(rng.choice((0.0, 0.0, 0.0, 0.001, 0.003)))
    status = ended(pid) if status is None else status
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return how, status


def differences(whole: Path, killed: Path) -> list[str]:
    """The differences between two finished runs, except those of clocks."""
    found = []
    for kept in ("last", "best"):
        for name in ("model", "ema", "optimizer"):
            file = f"checkpoints/{kept}/{name}.safetensors"
            if (whole / file).read_bytes() != (killed / file).read_bytes():
                found.append(file)
        states = [
            _plain(json.loads((f / "checkpoints" / kept / "state.json").read_text())) for f in (whole, killed)
        ]
        found += [f"{kept}/state.json: {key}" for key in states[0] if states[0][key] != states[1].get(key)]
    rows = [
        [_plain(json.loads(line)) for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (whole, killed)
    ]
    if rows[0] != rows[1]:
        found.append("metrics.jsonl")
    summaries = [_plain(json.loads((f / "summary.json").read_text())) for f in (whole, killed)]
    found += [f"summary.json: {key}" for key in summaries[0] if summaries[0][key] != summaries[1].get(key)]
    return found


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """A table without the entries that depend on a clock or the folder's name; `lines` are bytes, which hold rates."""
    left_out = ("seconds", "images_per_second", "folder", "lines", "peak_memory")
    return {key: value for key, value in table.items() if key not in left_out}


def soak(kills: int, seed: int, how: str, base: Path) -> dict[str, Any]:
    """Run both, and return the counts."""
    rng, epochs = random.Random(seed), max(4, EPOCHS_PER_KILL * kills)
    make_data(base / "set.npz")
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "fathoms", *command(base / "set.npz", base, "whole", epochs)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    undisturbed = time.monotonic() - began
    total = look(base / "whole" / "checkpoints")[2]
    rate = total / json.loads((base / "whole" / "summary.json").read_text())["seconds"]
    words, log = command(base / "set.npz", base, "killed", epochs), base / "killed.log"
    checkpoints = base / "killed" / "checkpoints"
    counts: Counter[str] = Counter()
    faults: list[str] = []
    reached = 0
    while counts["kills"] < kills:
        left = kills - counts["kills"]
        pid = start(words, how, log)
        kind, status = kill_somewhere(pid, checkpoints, rng, reached, (total - reached) / (left + 1), rate)
        if status is not None:
            faults.append(f"the run ended by itself with {status} after {counts['kills']} kills")
            break
        counts["kills"] += 1
        counts[f"killed {kind}"] += 1
        # Also a save that an earlier kill cut off, if this kill came before its removal.
        counts["kills that found a cut-off save"] += bool(temporary(checkpoints))
        there, wrong, updates = look(checkpoints)
        counts["checkpoints verified"] += there
        counts["unusable checkpoints"] += len(wrong)
        faults += [f"after kill {counts['kills']}: {reason}" for reason in wrong]
        if updates < reached:
            faults.append(f"after kill {counts['kills']}: back at update {updates}, after {reached}")
        counts["kills that lost no checkpoint"] += updates >= reached
        counts["attempts that saved something new"] += updates > reached
        reached = max(reached, updates)
        if counts["kills"] % 20 == 0:
            print(f"{counts['kills']} kills, update {reached} of {total}", file=sys.stderr, flush=True)
    pid = start(words, how, log)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    differ = (
        differences(base / "whole", base / "killed") if code == 0 else [f"the last attempt ended with {code}"]
    )
    return {
        "command": " ".join(words[2:]).replace(str(base), "FOLDER"),
        "starts by": how,
        "seed": seed,
        "updates": total,
        "updates before the last attempt": reached,
        **counts,
        "unusable checkpoints": counts["unusable checkpoints"],
        "faults": faults,
        "differences from the undisturbed run": differ,
        "equal bit for bit": not differ,
        "undisturbed_seconds": round(undisturbed, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", choices=("fork", "exec"), default="fork")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args()
    if args.start == "fork":
        # Imported before the first fork, and not used here: torch's threads do not survive a fork.
        import fathoms.cli.main
        import fathoms.report.page
        import fathoms.training.run  # noqa: F401
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        report = soak(args.kills, args.seed, args.start, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    good = report["equal bit for bit"] and not report["faults"] and report["kills"] == args.kills
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(f"{key}: {value}" for key, value in report.items()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
