"""A closed terminal (SIGHUP) saves as SIGTERM does; `nohup` still outlives it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time

from fathoms.training.distributed import CODES, StopRequest


def test_a_run_whose_terminal_closes_saves_first(tiny_runs):
    master, slave = pty.openpty()

    def own_terminal():
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        tiny_runs.command("--epochs", "2000"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=own_terminal,
    )
    os.close(slave)
    try:
        os.set_blocking(master, False)
        deadline = time.monotonic() + 90
        while not tiny_runs.lines("metrics.jsonl") and time.monotonic() < deadline:
            assert process.poll() is None
            try:
                os.read(master, 65536)
            except BlockingIOError:
                time.sleep(0.05)
        # The kernel sends SIGHUP to the session of a terminal that goes away, and every later print fails.
        os.close(master)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
        process.wait()
    assert tiny_runs.summary()["status"] == "interrupted"
    assert tiny_runs.state()["updates"] == tiny_runs.summary()["updates"] > 0


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.code is None
    finally:
        signal.signal(signal.SIGHUP, before)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.code == CODES[signal.SIGTERM]
