"""The completion scripts, asked by a real shell."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time

import pytest

from fathoms.cli.completion import FAMILIES, script
from fathoms.cli.main import COMMANDS
from fathoms.parts import families


def complete(*words):
    """The candidates that bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in ("fathoms", *words))
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _fathoms; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script()}\n{ask}"], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["data", "ch"], ["check"]),
        (["train", "--weight-d"], ["--weight-decay"]),
        (["train", "--norm", "dy"], ["dyt"]),
        (["data", "check", "--he"], ["--help"]),
        (["compare", "--keep", ""], ["none", "last", "all"]),
        (["train", "--no-am"], ["--no-amp"]),
        (["validate", "--no-u"], ["--no-use-ema"]),
        (["train", "--recipe", "cait"], ["cait_400"]),
        (["train", "--model", "cait_s24_2"], ["cait_s24_224"]),
        (["train", "--device", "c"], ["cpu", "cuda"]),
        (["compare", "--preset", "n"], ["norms"]),
        (["cost", "cait_s24_2"], ["cait_s24_224"]),
        (["parts", "mlp"], ["mlp", "mlp_placement"]),
        (["recipes", "dig"], ["digits"]),
        (["completion", ""], ["bash", "zsh"]),
    ],
)
def test_bash_offers_commands_flags_and_values(words, offered):
    assert set(offered) <= set(complete(*words))
    assert all(word.startswith(words[-1]) for word in complete(*words))


def test_every_command_is_offered():
    assert set(complete("")) == {name.split()[0] for name in COMMANDS}


def test_a_flag_is_offered_only_as_the_parser_takes_it():
    assert complete("validate", "--use") == []
    assert complete("train", "--no-js") == []


def test_an_argument_after_the_first_and_a_path_are_left_to_the_shell():
    assert complete("probe", "vit_digits", "cait") == []
    assert complete("train", "cait") == []


def test_every_family_of_parts_is_offered():
    assert set(FAMILIES) == set(families())


def typed(shell, start, line):
    """The line of a real shell after `line` was typed into a terminal."""
    program, terminal = pty.fork()
    if program == 0:
        os.environ.update(TERM="dumb", PS1="ready> ")
        os.execvp(shell[0], shell)
    try:
        # A prompt of its own says that the script was read, in two pieces since the terminal echoes the command; no
        # completion has an "@", so that is the end.
        os.write(terminal, f"{start}; PS1='now''here> '\n".encode())
        read_until(terminal, "nowhere> ")
        os.write(terminal, f"{line}\t @".encode())
        return read_until(terminal, "@").rpartition("fathoms")[2]
    finally:
        os.close(terminal)
        os.kill(program, signal.SIGKILL)
        os.waitpid(program, 0)


def read_until(terminal, end, seconds=30):
    """The text of a terminal until `end`, without its control sequences."""
    shown, last = "", time.monotonic() + seconds
    while end not in shown:
        assert time.monotonic() < last, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
            shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|[\x07\x08\r]", "", shown)
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("fathoms tr", "train"),
        ("fathoms data ch", "data check"),
        ("fathoms train --norm dy", "train --norm dyt"),
        ("fathoms recipes dig", "recipes digits"),
        ("fathoms predict kit", "predict kitten.jpg"),
    ],
)
def test_a_real_shell_completes_what_is_typed(shell, line, completed, tmp_path, monkeypatch):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kitten.jpg").touch()
    monkeypatch.setenv("ZDOTDIR", str(tmp_path))
    (tmp_path / "script").write_text(f"{script(shell)}\n")
    words = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}[shell]
    assert typed(words, "source ./script", line).split() == [*completed.split(), "@"]
