"""ProcessPool alone: a process that stops, a wait that is cut short, an error that cannot be pickled."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time

import pytest

from fathoms.data.errors import DataError, LoaderError
from fathoms.data.loader import CAN_FORK
from fathoms.data.workers.process_handle import ProcessStatus
from fathoms.data.workers.process_pool import ProcessPool
from fathoms.data.workers.shared_memory import Arena

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="processes are forked, which is for Linux"),
    # Python 3.12 warns of every fork of a process with threads; the children use none of them.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class OddError(DataError):
    """An error that is not made of its message."""

    def __init__(self, row, column):
        super().__init__(f"row {row}, column {column}")


class ClosedError(DataError):
    """An error that carries what cannot be sent."""

    def __init__(self, message):
        super().__init__(message)
        self.why = lambda: message


def work(task, worker, _make):
    kind, value = task
    worker.begin(str(value))
    if kind == "sleep":
        time.sleep(value)
    if kind == "odd":
        raise OddError(1, value)
    if kind == "closed":
        raise ClosedError(f"row {value}")
    return bytes(value) if kind == "large" else value


@contextlib.contextmanager
def pool_of(count=1, timeout=60.0, slots=8):
    reports = []
    pool = ProcessPool(work, count, timeout, reports.append, Arena(slots, 16, False), slots)
    pool.reports = reports
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.clock
def test_a_process_that_was_stopped_between_two_tasks_is_replaced():
    with pool_of(timeout=0.5) as pool:
        pool.submit(0, ("say", 5))
        assert pool.take()[:2] == (0, 5)
        os.kill(pool.handles[0].pid, signal.SIGSTOP)
        # Nobody waits for it yet, so nothing is wrong with it.
        time.sleep(0.6)
        assert not pool.handles[0].trouble(0.5)
        began = time.monotonic()
        pool.submit(1, ("say", 6))
        assert pool.take()[:2] == (1, 6)
        assert time.monotonic() - began < 3
        assert len(pool.reports) == 1
        assert "data-worker-0 has hung for" in pool.reports[0]


@pytest.mark.clock
def test_results_that_were_not_fetched_for_long_are_not_a_sign_of_hanging():
    with pool_of(2, timeout=0.5) as pool:
        for number in range(4):
            pool.submit(number, ("say", number))
        time.sleep(1.0)
        os.kill(pool.handles[0].pid, signal.SIGKILL)
        time.sleep(0.1)
        assert sorted(pool.take()[1] for _ in range(4)) == [0, 1, 2, 3]
        assert all("died" in report for report in pool.reports)


@pytest.mark.clock
def test_what_takes_long_is_not_waited_for_when_an_epoch_is_left():
    with pool_of(2) as pool:
        pool.submit(0, ("sleep", 60))
        pool.submit(1, ("say", 1))
        began = time.monotonic()
        pool.finish()
        assert time.monotonic() - began < 4
        assert pool.closed


@pytest.mark.parametrize(("kind", "message"), [("odd", "row 1, column 4"), ("closed", "row 4")])
def test_errors_that_cannot_be_pickled_arrive_as_their_message(kind, message):
    with pool_of() as pool:
        pool.submit(0, (kind, 4))
        with pytest.raises(DataError, match=message):
            pool.take()
        pool.submit(1, ("say", 7))
        assert pool.take()[:2] == (1, 7)
        assert not pool.reports


@pytest.mark.clock
def test_a_process_that_dies_in_the_middle_of_a_message_is_replaced():
    with pool_of() as pool:
        pool.submit(0, ("large", 10_000_000))
        # It has filled its pipe and waits for a reader.
        time.sleep(0.5)
        os.kill(pool.handles[0].pid, signal.SIGKILL)
        time.sleep(0.1)
        assert len(pool.take()[1]) == 10_000_000
        assert len(pool.reports) == 1
        assert "died" in pool.reports[0]


def test_an_interrupted_wait_ends_the_pool():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pool_of() as pool:
            pool.submit(0, ("sleep", 1))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pool.take()
            # A message may have been read by half: what would come next is nobody's.
            assert pool.closed
            pool.finish()
            with pytest.raises(LoaderError, match="have ended"):
                pool.take()
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
    worker = ProcessStatus("data-worker-0")
    worker.begin(os.fsdecode(b"cat\xff.jpg"))
    assert worker.item == "cat\\udcff.jpg"


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
            pool.submit(number, ("say", number))
        assert sorted(pool.take()[1] for _ in range(4)) == [0, 1, 2, 3]
        assert not pool.reports
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.clock
def test_a_process_its_parent_never_knew_of_ends(monkeypatch):
    fork, pids = os.fork, []

    def noted():
        pids.append(fork())
        return pids[-1]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr("fathoms.data.workers.process_pool.ProcessHandle", interrupted)
    with pytest.raises(KeyboardInterrupt), pool_of():
        pass
    gc.collect()
    deadline, ended = time.monotonic() + 5, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
        ended = os.waitpid(pids[0], os.WNOHANG)[0]
    assert ended == pids[0]
