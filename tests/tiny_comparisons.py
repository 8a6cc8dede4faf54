"""Tiny comparisons: run them in this process or another, and read the results. Used by tests/compare."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from fathoms.cli import compare as command
from fathoms.cli.flags.parse import parse
from fathoms.cli.main import main
from fathoms.comparing.presets import PRESETS

FLAGS = [
    *("--depth", "2", "--dim", "16", "--heads", "2", "--warmup-epochs", "0"),
    *("--epochs", "2", "--batch-size", "96", "--device", "cpu"),
]
"""The embedded digits: 14 updates an epoch of two blocks of 16 channels."""


def flags_beside(words):
    """The flags without those that the words make an axis, by --axis or by a preset."""
    axes = {after.partition("=")[0] for word, after in pairwise(words) if word == "--axis"}
    for word, after in pairwise(words):
        axes |= set(PRESETS.get(after, {}).get("axes", ())) if word == "--preset" else set()
    return [
        word for flag in zip(FLAGS[::2], FLAGS[1::2], strict=True) if flag[0][2:] not in axes for word in flag
    ]


class Comparisons:
    """Comparisons under one folder, by name."""

    def __init__(self, root):
        self.root, self.data = root, None

    def words(self, *more, name="c"):
        data = [] if self.data is None else [str(self.data)]
        return [*data, *flags_beside(more), "--output", str(self.root), "--experiment", name, *more]

    def run(self, *more, name="c"):
        return main(["compare", *self.words(*more, name=name)])

    def make(self, *more, name="c", beside=True):
        """The comparison that a command describes, not run; beside: with the flags of a tiny model."""
        own = [*more, "--output", str(self.root), "--experiment", name]
        words = self.words(*more, name=name) if beside else own
        return command.make_comparison(parse(command, "compare", words))

    def start(self, *more, name="c"):
        line = [sys.executable, "-m", "fathoms", "compare", *self.words(*more, name=name)]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def folder(self, name="c"):
        return self.root / name

    def read(self, file, name="c"):
        return json.loads((self.root / name / file).read_text())

    def rows(self, name="c"):
        return self.read("results.json", name)["cells"]


def wait_for(what, process, seconds=120):
    """Wait until `what()` is true, or fail with what the process printed."""
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def children(pid):
    """The process ids of a process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid):
    """Whether a process is there and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sabotage(folder, monkeypatch, code):
    """Run `code` in every Python process that starts from now on, before anything else."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
