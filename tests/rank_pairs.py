"""Two ranks of one run as forked processes: `ends(pair(folder, words, words))`."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch.distributed as dist

RANK = str(Path(__file__).parent / "faults" / "rank.py")

# Separate processes, forked from one that has imported torch already: a start costs no seconds.
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(
    ["torch.distributed.fsdp", "scipy.special", "fathoms.cli.train", "fathoms.training.run"]
)
START = """
import os, runpy, sys
os.environ.update(env)
sys.argv = [script, *words]
sys.stdout = sys.stderr = open(log, "w", buffering=1)
runpy.run_path(script, run_name="__main__")
"""


def pair(folder, *words_of_each, **env):
    """Two ranks of one run, started by hand."""
    # The store is here, as it is with torchrun, so that nobody else can take its port in the meantime.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", **env}
    started = []
    for rank, words in enumerate(words_of_each):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        names = {"env": {**shared, **own}, "script": RANK, "words": words}
        names["log"] = str(folder / f"printed-{rank}.txt")
        process = RANKS.Process(target=exec, args=(START, names), daemon=True)
        process.start()
        started.append((process, Path(names["log"]), store))
    return started


def ends(started):
    """The output of each rank, and its exit code."""
    for process, *_ in started:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
            process.join()
    return [(log.read_text(), process.exitcode) for process, log, _ in started]
