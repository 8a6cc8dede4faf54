"""Atomic writes: a file is replaced whole, or stays as it was."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from fathoms.errors import WeightsError
from fathoms.files import replacing, write_atomic


def test_a_file_is_replaced_and_nothing_lies_beside_it(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_half_way_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_bytes(b"ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_never_share_a_name_and_keep_the_ending(tmp_path):
    path = tmp_path / "model.pt2"
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        assert {first.suffix, second.suffix} == {".pt2"}
        assert first.parent == second.parent == tmp_path
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"


def test_a_file_is_readable_as_any_other_the_user_makes(tmp_path):
    """A name from `mkstemp` would be for its owner alone."""
    (tmp_path / "plain").write_bytes(b"")
    write_atomic(tmp_path / "whole", b"")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_mode_follows_the_umask_whoever_writes_the_file(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "w.safetensors") as temporary:
            save_file({"a": torch.zeros(1)}, temporary)
        write_atomic(tmp_path / "a.json", b"{}")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == {"w.safetensors": "0o640", "a.json": "0o640"}


def test_errors_name_the_file_that_was_asked_for(tmp_path):
    def fail(error):
        with replacing(tmp_path / "model.onnx") as temporary:
            raise error(temporary)

    with pytest.raises(WeightsError) as weights:
        fail(lambda path: WeightsError(f"{path}: holds nothing"))
    assert str(weights.value) == f"{tmp_path / 'model.onnx'}: holds nothing"
    with pytest.raises(OSError, match="full") as disk:
        fail(lambda path: OSError(28, "the disk is full", str(path)))
    assert disk.value.filename == str(tmp_path / "model.onnx")
    with pytest.raises(FileNotFoundError) as missing:
        write_atomic(tmp_path / "none" / "a.json", b"")
    assert missing.value.filename == str(tmp_path / "none" / "a.json")
