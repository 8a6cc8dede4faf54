"""The completion scripts, asked by a real shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fathoms.cli.completion import script
from fathoms.cli.main import COMMANDS


def complete(*words):
    """The candidates that bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in ("fathoms", *words))
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; compopt() {{ :; }}; _fathoms; echo "${{COMPREPLY[@]}}"'
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
    ],
)
def test_bash_offers_commands_flags_and_values(words, offered):
    assert set(offered) <= set(complete(*words))
    assert all(word.startswith(words[-1]) for word in complete(*words))


def test_every_command_is_offered():
    assert set(complete("")) == {name.split()[0] for name in COMMANDS}


def test_zsh_reads_the_script():
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed here")
    code = f"autoload -Uz compinit && compinit -D; autoload -Uz bashcompinit && bashcompinit\n{script()}"
    done = subprocess.run(["zsh", "-fc", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
