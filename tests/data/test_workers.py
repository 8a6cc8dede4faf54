"""The pool of processes alone: one that stops, a wait that is cut short, an error that cannot be pickled."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time

import numpy as np
import pytest

from fathoms.data import CropOptions, Refs, TrainTransform
from fathoms.data.images.transforms import Chunk
from fathoms.data.loader import CAN_FORK
from fathoms.data.processes import Processes
from fathoms.data.sampler import LoaderStats
from fathoms.data.sources.source import DataError, LoaderError
from fathoms.data.workers import Done, Status, Task, TaskRunner

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="processes are forked, which is for Linux"),
    # Python 3.12 warns of every fork of a process with threads; the children use none of them.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:loader. data-worker:RuntimeWarning"),
]

SAY, SLEEP, ODD, CLOSED, LARGE = range(5)


class OddError(DataError):
    """An error that is not made of its message."""

    def __init__(self, row, column):
        super().__init__(f"row {row}, column {column}")


class ClosedError(DataError):
    """An error that carries what cannot be sent."""

    def __init__(self, message):
        super().__init__(message)
        self.why = lambda: message


class Runner(TaskRunner):
    """What a process does, by the task's epoch; the labels of the result say the number in the task."""

    def __init__(self):
        pass

    def __call__(self, task, status, _allocate):
        value = int(task.refs.index[0])
        status.begin(str(value))
        if task.epoch == SLEEP:
            time.sleep(value)
        if task.epoch == ODD:
            return Done(None, [], OddError(1, value))
        if task.epoch == CLOSED:
            return Done(None, [], ClosedError(f"row {value}"))
        status.begin("")
        return Done(Chunk(np.full(value if task.epoch == LARGE else 1, value)), [])


def task(kind, value):
    zero = np.zeros(1, int)
    return Task(Refs(np.array([value]), zero, zero), kind, TrainTransform(8, CropOptions(), 0))


@contextlib.contextmanager
def pool_of(count=1, timeout=60.0):
    pool = Processes(Runner(), count, timeout, LoaderStats(), 0, False, 8, 16)
    try:
        yield pool
    finally:
        pool.close()


def said(pool, *numbers):
    return [pool.result(number).labels.tolist() for number in numbers]


@pytest.mark.clock
def test_a_process_that_was_stopped_between_two_tasks_is_replaced():
    with pool_of(timeout=0.5) as pool:
        pool.submit(0, task(SAY, 5))
        assert said(pool, 0) == [[5]]
        os.kill(pool.workers[0].pid, signal.SIGSTOP)
        # Nobody waits for it yet, so nothing is wrong with it.
        time.sleep(0.6)
        assert not pool.workers[0].trouble(0.5)
        began = time.monotonic()
        pool.submit(1, task(SAY, 6))
        assert said(pool, 1) == [[6]]
        assert time.monotonic() - began < 3
        (accident,) = pool._stats.accidents
        assert "data-worker-0 has hung for" in accident


@pytest.mark.clock
def test_results_that_were_not_fetched_for_long_are_not_a_sign_of_hanging():
    with pool_of(2, timeout=0.5) as pool:
        for number in range(4):
            pool.submit(number, task(SAY, number))
        time.sleep(1.0)
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        time.sleep(0.1)
        assert said(pool, 0, 1, 2, 3) == [[0], [1], [2], [3]]
        assert all("died" in accident for accident in pool._stats.accidents)


@pytest.mark.clock
def test_what_takes_long_is_not_waited_for_when_an_epoch_is_left():
    with pool_of(2) as pool:
        pool.submit(0, task(SLEEP, 60))
        pool.submit(1, task(SAY, 1))
        began = time.monotonic()
        pool.finish()
        assert time.monotonic() - began < 4
        assert pool.closed


@pytest.mark.parametrize(("kind", "message"), [(ODD, "row 1, column 4"), (CLOSED, "row 4")])
def test_errors_that_cannot_be_pickled_arrive_as_their_message(kind, message):
    with pool_of() as pool:
        pool.submit(0, task(kind, 4))
        with pytest.raises(DataError, match=message):
            pool.result(0)
        pool.submit(1, task(SAY, 7))
        assert said(pool, 1) == [[7]]
        assert not pool._stats.accidents


@pytest.mark.clock
def test_a_process_that_dies_in_the_middle_of_a_message_is_replaced():
    with pool_of() as pool:
        pool.submit(0, task(LARGE, 1_000_000))
        # It has filled its pipe and waits for a reader.
        time.sleep(0.5)
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        time.sleep(0.1)
        assert len(pool.result(0).labels) == 1_000_000
        (accident,) = pool._stats.accidents
        assert "died" in accident


def test_an_interrupted_wait_ends_the_pool():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pool_of() as pool:
            pool.submit(0, task(SLEEP, 1))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pool.result(0)
            # A message may have been read by half: what would come next is nobody's.
            assert pool.closed
            pool.finish()
            with pytest.raises(LoaderError, match="have ended"):
                pool.result(0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_processes_that_were_begun_do_not_outlive_a_pool_that_could_not_be(monkeypatch):
    fork, pids = os.fork, []

    def scarce():
        if len(pids) == 2:
            raise BlockingIOError("no more processes")
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", scarce)
    with pytest.raises(BlockingIOError), pool_of(3):
        pass
    gc.collect()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_file_names_that_are_not_text_can_be_reported():
    status = Status("data-worker-0")
    status.begin(os.fsdecode(b"cat\xff.jpg"))
    assert status.item == "cat\\udcff.jpg"


def test_an_interrupt_at_birth_does_not_send_a_child_down_its_parents_way(monkeypatch):
    fork = os.fork

    def interrupted():
        pid = fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(1)
        return pid

    monkeypatch.setattr(os, "fork", interrupted)
    with pool_of(2) as pool:
        for number in range(4):
            pool.submit(number, task(SAY, number))
        assert said(pool, 0, 1, 2, 3) == [[0], [1], [2], [3]]
        assert not pool._stats.accidents
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.clock
def test_a_process_its_parent_never_knew_of_ends(monkeypatch):
    fork, mask, pids = os.fork, signal.pthread_sigmask, []

    def noted():
        pids.append(fork())
        return pids[-1]

    def interrupted(how, signals):
        before = mask(how, signals)
        if how == signal.SIG_SETMASK:
            raise KeyboardInterrupt
        return before

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt), pool_of():
        pass
    gc.collect()
    deadline, ended = time.monotonic() + 5, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
        ended = os.waitpid(pids[0], os.WNOHANG)[0]
    assert ended == pids[0]
