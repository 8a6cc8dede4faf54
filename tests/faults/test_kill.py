"""F1: SIGKILL at any moment of a save; the newest checkpoint is whole, and only the one being written is lost."""

from __future__ import annotations

import json
import subprocess
import sys

KILLS = 30

# One process that imports torch and forks those that are killed, so that a kill costs a tenth of a second.
LOOP = """
import itertools, json, os, random, signal, sys, time, warnings
from pathlib import Path
import torch
from fathoms.training import checkpoint_files as checkpoints
warnings.simplefilter("error")
torch.set_num_threads(1)
place, rng, newest, killed_in_a_save = Path(sys.argv[1]), random.Random(0), 0, 0
place.mkdir(parents=True)

def number(folder):
    return json.loads((folder / "state.json").read_text())["updates"]

def save(saves=None):
    checkpoints.clean_up(place)
    for count in itertools.count(newest + 1) if saves is None else range(1, saves + 1):
        tensors = {"model": {f"w{i}": torch.full((50_000,), float(count)) for i in range(8)}}
        kept = checkpoints.Checkpoint(tensors, {"updates": count})
        checkpoints.save(place, kept, keep=3, best=count % 3 == 0)

# How long a save takes is the disk's affair.
began = time.monotonic()
save(4)
newest, one = 4, (time.monotonic() - began) / 4
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        save()
    time.sleep(rng.uniform(0.1, 4) * one)
    os.kill(child, signal.SIGKILL)
    # It was saving until then, and did not end by an error of its own.
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    killed_in_a_save += (place / checkpoints.FRESH).exists()
    # A damaged newest would warn, and a warning is an error here.
    folder = checkpoints.newest(place)
    if folder is not None:
        assert number(folder) >= newest, (number(folder), newest)
        newest = number(folder)
checkpoints.clean_up(place)
print(json.dumps({"newest": newest, "in_a_save": killed_in_a_save, "left": sorted(p.name for p in place.iterdir())}))
"""


def test_thirty_kills_leave_no_unusable_checkpoint(tmp_path):
    line = [sys.executable, "-c", LOOP, str(tmp_path / "checkpoints"), str(KILLS)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["newest"] > 4
    # Most of a save is writing: if no kill fell into one, nothing was tried.
    assert report["in_a_save"] >= KILLS // 4
    assert not [name for name in report["left"] if name.startswith(".")]
