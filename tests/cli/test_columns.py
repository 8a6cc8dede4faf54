"""The terminal at 80 columns: these commands print no longer line on the digits, but for paths."""

from __future__ import annotations

import re

import pytest

from fathoms.cli.main import main

TINY = ["--depth", "2", "--dim", "16", "--heads", "2", "--device", "cpu"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["models"],
        ["parts", "norm"],
        ["recipes"],
        ["train", *TINY, "--epochs", "2"],
        ["compare", *TINY, "--axis", "norm=layernorm,rmsnorm", "--seeds", "3", "--epochs", "2"],
        ["cost", *TINY, "--recipe", "digits"],
    ],
    ids=lambda words: words[0] if words else "fathoms",
)
def test_no_line_is_wider_than_a_terminal(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    out, err = capfd.readouterr()
    # The author's names of his models, and those of run folders, are as long as they are.
    wide = [
        line
        for line in (out + err).splitlines()
        if len(line) > 80 and not re.search("runs/|_embed_dim", line)
    ]
    assert wide == []
