"""F6, F22 and F23: ranks that die, are stopped alone, disagree, or change in number."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from fathoms.training import checkpoint_files as checkpoints
from rank_pairs import RANK, ends, pair
from tiny_runs import stop_after_update


def torchrun(*words, restarts=0, **env):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line += ["--max-restarts", str(restarts), RANK, *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, env={**os.environ, **env})


def test_a_dead_rank_ends_the_other_with_the_reason_and_a_restart_resumes_exactly(tiny_runs):
    """F22: SIGKILL once with nobody to restart, once under torchrun; the end is that of an undisturbed pair."""
    words = ["--batch-size", "16", "--recovery-interval", "2", "--model-ema", "--model-ema-decay", "0.5"]
    assert [code for _, code in ends(pair(tiny_runs.root, *[tiny_runs.words(*words, name="whole")] * 2))] == [
        0,
        0,
    ]

    started = pair(tiny_runs.root, *[tiny_runs.words(*words, name="cut")] * 2, KILL="1:5")
    started[1][0].join(timeout=120)
    died = time.monotonic()
    (printed, code), (_, killed) = ends(started)
    assert time.monotonic() - died < 30
    assert killed == -9
    assert code == 2
    assert "rank 0: another rank of this run has died or does not respond" in printed
    assert "Traceback" not in printed
    assert tiny_runs.summary("cut")["status"] == "failed"
    assert tiny_runs.state("cut")["updates"] == 4

    done = torchrun(*tiny_runs.words(*words, name="cut"), restarts=1, KILL="1:11")
    assert done.returncode == 0, done.stderr[-2000:]
    assert tiny_runs.same("whole", "cut")


def test_no_rank_exits_while_rank_0_still_saves(tiny_runs):
    """torchrun ends the others when one has exited after a signal."""
    done = torchrun(*tiny_runs.words("--batch-size", "16"), STOP="0:3,1:3", SLOW_SAVE="2")
    assert done.returncode == 1
    assert tiny_runs.summary()["status"] == "interrupted"
    assert checkpoints.why_unusable(tiny_runs.folder() / "checkpoints" / "last") is None
    assert (tiny_runs.folder() / "report.html").is_file()


def test_shards_move_from_two_ranks_to_one_and_back(tiny_runs):
    """F6 and FSDP2 2 -> 1 -> 2; a signal to one rank alone stops both after the same update, exit 143."""
    plain = ["--crop", "whole"]
    tiny_runs.train(*plain, name="one")
    halves = tiny_runs.words(*plain, "--batch-size", "16", "--fsdp", name="moved")
    results = ends(pair(tiny_runs.root, halves, halves, STOP="1:3"))
    assert [code for _, code in results] == [143, 143], results[0][0][-2000:]
    stopped_at = tiny_runs.state("moved")["updates"]
    assert 4 <= stopped_at <= 5

    alone = tiny_runs.trainer(*plain, name="moved")
    stop_after_update(alone, 9)
    printed, train = [], alone._train
    alone._train = lambda notices: printed.extend(notices) or train(notices)
    assert alone.run().code == 143
    assert any(line.startswith("resumes with 1 ranks instead of 2") for line in printed)

    assert [code for _, code in ends(pair(tiny_runs.root, halves, halves))] == [0, 0]
    losses = [[row["loss"] for row in tiny_runs.metrics(name)] for name in ("one", "moved")]
    # Sums in another order: 1e-4 is a thousand times the difference that float32 makes here.
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert checkpoints.why_unusable(tiny_runs.folder("moved") / "checkpoints" / "last") is None


# A thread of the process group frees a tensor while the last exit handler holds the GIL, as it may on a busy
# machine: it then waits for the GIL when Python begins to finalize.
LATE_THREAD = """
import atexit, contextlib, os, sys, time
reader, writer = os.pipe()
atexit.register(sum, range(3 * 10**7))
atexit.register(os.write, writer, b".")
import torch
import torch.distributed as dist
import fathoms.training.distributed
from fathoms.cli import main as cli
other = os.fork()
rank = 0 if other else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
held, values = dist.group.WORLD, torch.ones(4)
if rank == 0:
    os.close(writer)
    os.read(reader, 1)
    time.sleep(0.1)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(values)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) % 256)
dist.all_reduce(values, async_op=True)
dist.destroy_process_group()
os.environ["RANK"], cli.main = "1", lambda: 3 // int(sys.argv[2])
cli.command()
"""


@pytest.mark.parametrize(("parts", "code"), [("1", 3), ("0", 1)])
def test_a_rank_ends_with_its_code_whatever_the_threads_of_its_group_do(tmp_path, parts, code):
    """Also after an unexpected error."""
    line = [sys.executable, "-c", LATE_THREAD, str(tmp_path / "store"), parts]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr[-2000:]
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)


def test_a_rank_that_is_lost_before_training_is_named(tiny_runs):
    nowhere = ["/nowhere", *tiny_runs.words("--batch-size", "16")[1:]]
    (printed, code), (other, refused) = ends(
        pair(tiny_runs.root, tiny_runs.words("--batch-size", "16"), nowhere)
    )
    assert (code, refused) == (2, 2)
    assert "/nowhere" in other
    assert "rank 0: another rank of this run has died or does not respond" in printed
    assert "Traceback" not in printed


def test_ranks_that_were_started_differently_are_refused(tiny_runs):
    """F23."""
    results = ends(
        pair(
            tiny_runs.root,
            tiny_runs.words("--batch-size", "16"),
            tiny_runs.words("--batch-size", "16", "--lr", "0.5"),
        )
    )
    assert [code for _, code in results] == [2, 2]
    assert "rank 1 has another config or other data than rank 0; start all ranks alike" in results[0][0]
    assert not (tiny_runs.folder() / "checkpoints").exists()
