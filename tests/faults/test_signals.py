"""F2, F3, F26 and F28: signals, closed pipes, two runs in one folder."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.cli.terminal.streams import make_safe
from fathoms.training import checkpoint_files as checkpoints
from fathoms.training.distributed import CODES, ECHO, LAUNCHED, StopRequest


def started(tiny_runs, *words):
    """A run of many epochs in a separate process, once it has written its first row."""
    rows = len(tiny_runs.lines("metrics.jsonl"))
    process = subprocess.Popen(
        tiny_runs.command("--epochs", "2000", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while len(tiny_runs.lines("metrics.jsonl")) <= rows and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    assert len(tiny_runs.lines("metrics.jsonl")) > rows, "no row in 90 s"
    return process


def test_signals_finish_the_update_save_and_exit_and_the_same_command_resumes(tiny_runs):
    """SIGUSR1 as Slurm sends it, then Ctrl-C; a second run in the folder meanwhile is refused (F28)."""
    updates = 0
    for number, code in ((signal.SIGUSR1, 143), (signal.SIGINT, 130)):
        process = started(tiny_runs)
        if number is signal.SIGUSR1:
            with pytest.raises(FathomsError, match="another run holds this folder"):
                tiny_runs.train("--epochs", "2000")
        process.send_signal(number)
        _, printed = process.communicate(timeout=60)
        assert process.returncode == code, printed
        assert "Traceback" not in printed
        assert printed.count("a signal came: the run ends after this update") == 1
        assert tiny_runs.summary()["status"] == "interrupted"
        assert checkpoints.why_unusable(tiny_runs.folder() / "checkpoints" / "last") is None
        assert tiny_runs.state()["updates"] == tiny_runs.summary()["updates"] > updates
        updates = tiny_runs.state()["updates"]


def test_the_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time\n"
        "from fathoms.training.distributed import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stop.code == 143\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 130, done.stderr
    assert time.monotonic() - began < 30


def test_an_echo_of_the_first_signal_does_not_count(monkeypatch):
    """A signal to a whole job reaches its ranks twice: directly, and through torchrun."""
    left = []
    monkeypatch.setattr("fathoms.training.distributed.os._exit", left.append)
    for late, launched in ((0.0, True), (ECHO + 1, True), (0.0, False)):
        monkeypatch.setenv(LAUNCHED, "run") if launched else monkeypatch.delenv(LAUNCHED)
        now = itertools.chain([100.0], itertools.repeat(100.0 + late))
        monkeypatch.setattr("fathoms.training.distributed.time.monotonic", lambda now=now: next(now))
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.code == 143
        assert len(left) == {(0.0, True): 0, (ECHO + 1, True): 1, (0.0, False): 2}[late, launched]


def test_handlers_are_restored_and_a_thread_may_train():
    before = {number: signal.getsignal(number) for number in CODES}
    with StopRequest():
        assert all(signal.getsignal(number) != before[number] for number in CODES)
    assert {number: signal.getsignal(number) for number in CODES} == before
    seen = []

    def elsewhere():
        with StopRequest() as stop:
            seen.append(stop.code)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [None]


def test_closed_pipes_change_nothing(tiny_runs, monkeypatch):
    """F26: pipes whose reader has gone (a real EPIPE), then no stdout and stderr at all."""
    for name in ("pipe", "closed"):
        if name == "pipe":
            ends = [os.pipe() for _ in range(2)]
            for reader, _ in ends:
                os.close(reader)
            files = [io.TextIOWrapper(os.fdopen(writer, "wb", 0), write_through=True) for _, writer in ends]
        else:
            files = [None, None]
        monkeypatch.setattr(sys, "stdout", files[0])
        monkeypatch.setattr(sys, "stderr", files[1])
        monkeypatch.setenv("NO_COLOR", "1")
        make_safe()
        code = main(["train", *tiny_runs.words(name=name)])
        monkeypatch.undo()
        for file in files:
            if file is not None:
                file.close()
        assert code == 0
        assert json.loads((tiny_runs.folder(name) / "summary.json").read_text())["status"] == "done"
    assert tiny_runs.same("pipe", "closed")


@pytest.mark.parametrize(("importing", "code"), [(True, 130), (False, 7)])
def test_an_import_cannot_swallow_ctrl_c(tmp_path, importing, code):
    """numpy's import does; elsewhere the interrupt stays an exception, which may be handled."""
    body = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass
except BaseException:
    pass
"""
    (tmp_path / "greedy.py").write_text(body)
    script = f"""
import signal, sys
from fathoms.cli.main import interrupt
signal.signal(signal.SIGINT, interrupt)
{"import greedy" if importing else body}
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == code
