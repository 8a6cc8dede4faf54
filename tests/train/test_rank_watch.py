"""A rank that stops answering is named, once in a while, by the lowest rank that is alive."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from fathoms.train.rank_watch import SILENCE, RankWatch


class Store(dict):
    """The store's `add`, in memory."""

    def add(self, key, amount):
        self[key] = self.get(key, 0) + amount
        return self[key]


def ranks(size=3):
    store, said = Store(), []
    watches = [RankWatch(store, r, size, lambda line, r=r: said.append((r, line))) for r in range(size)]
    return watches, said


def beat(watches, start, seconds, *, without=()):
    for second in range(0, int(seconds), 5):
        for watch in watches:
            if watch.rank not in without:
                watch.beat(start + second)


def test_ranks_that_answer_are_not_named():
    watches, said = ranks()
    beat(watches, time.monotonic(), 300)
    assert said == []


def test_a_silent_rank_is_named_by_the_lowest_that_lives_and_again_when_it_answers():
    watches, said = ranks()
    now = time.monotonic()
    beat(watches, now, 60)
    beat(watches, now + 60, SILENCE + 10, without=(1,))
    assert [who for who, _ in said] == [0]
    assert said[0][1].startswith("rank 1 has not answered for 3")
    beat(watches, now + 60 + SILENCE + 10, 10)
    assert said[-1] == (0, "rank 1 answers again")


def test_a_silent_first_rank_is_named_by_the_second():
    watches, said = ranks()
    now = time.monotonic()
    beat(watches, now, 20)
    beat(watches, now + 20, SILENCE + 10, without=(0,))
    assert [(who, line.partition(" has")[0]) for who, line in said] == [(1, "rank 0")]


RANK = """
import time, torch
import fathoms.train.rank_watch as rank_watch
rank_watch.INTERVAL, rank_watch.SILENCE = 0.2, 1.5
from fathoms.train.distributed import join_world, naming_lost_ranks, gather_objects
world = join_world("cpu")
with naming_lost_ranks(world):
    print("ready", flush=True)
    for _ in range(200):
        gather_objects(world, None)
        time.sleep(0.05)
"""


def test_a_stopped_process_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env={**common, "RANK": str(r)}, stdout=pipe, stderr=pipe, text=True
        )
        for r in range(2)
    ]
    try:
        for process in started:
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        os.kill(started[1].pid, signal.SIGSTOP)
        assert started[0].stderr.readline().startswith("rank 1 has not answered for ")
    finally:
        for process in started:
            process.kill()
            process.communicate()
