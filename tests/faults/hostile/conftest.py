"""Every hostile input is refused in one printable line with exit code 2, nothing run, nothing written."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fathoms.cli.main import main

# What a child may take beyond what Python and torch have mapped when it starts.
ROOM = 1 << 30


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file and link below a folder, with what it holds; a giant with holes by its size."""
    seen: dict[str, tuple] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        small = stat.S_ISREG(about.st_mode) and about.st_size < 1 << 26
        report = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
        seen[str(path)] = (stat.S_IFMT(about.st_mode), about.st_size if not path.is_dir() else 0, report)
    return seen


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(capsys, place):
    """Run a command that must refuse what it is given."""

    def run(*words: str, says: str = "") -> str:
        before = snapshot(place.parent)
        capsys.readouterr()
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        assert printed.err.count("\n") == 1, printed.err
        assert printed.err.rstrip("\n").isprintable()
        assert says in printed.err
        assert snapshot(place.parent) == before
        return printed.err

    return run


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = str(sentinel)

    def __reduce__(self):
        return os.system, (f"touch '{self.sentinel}'",)


@pytest.fixture
def evil(place):
    """A pickle that would leave a sentinel; the fixture asserts at the end that it did not."""
    sentinel = place.parent / "sentinel"
    yield pickle.dumps({"model": {"stem.proj.weight": Evil(sentinel)}})
    assert not sentinel.exists(), "code out of a file was run"


CHILD = """
import io, json, resource, sys, time, contextlib
from fathoms.cli.main import main
import torch, numpy, PIL.Image, safetensors.torch, fathoms.models.vit, fathoms.data, fathoms.evaluating.load
room = int(sys.argv[1])
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + room, held + room))
for line in sys.stdin:
    words, began, err, out = json.loads(line), time.process_time(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        code = main(words)
    report = {"code": code, "err": err.getvalue(), "out": out.getvalue(), "seconds": time.process_time() - began}
    print(json.dumps(report), flush=True)
"""


@pytest.fixture
def bounded(place):
    """Run commands one after another in a child whose memory has a hard limit; the output and time of each."""

    def run(*lines: list[str], room: int = ROOM) -> list[dict]:
        lines = [[str(word) for word in words] for words in lines]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(room)],
            input="".join(json.dumps(words) + "\n" for words in lines),
            capture_output=True,
            text=True,
            cwd=place,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        report = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(report) == len(lines), f"{lines[len(report)]} ended the process: {done.stderr[-2000:]}"
        return report

    return run


def assert_one_line(report: dict, says: str, seconds: float = 5.0) -> None:
    """Exit code 2, one printable line that says `says`, in bounded time."""
    assert report["code"] == 2, report
    assert report["err"].count("\n") == 1, report["err"]
    assert report["err"].rstrip("\n").isprintable()
    assert says in report["err"], report["err"]
    assert report["seconds"] < seconds


@pytest.fixture
def one_line():
    return assert_one_line


@pytest.fixture(autouse=True)
def no_core_files():
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
