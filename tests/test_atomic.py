"""Atomic writes: a file is replaced whole, or stays as it was."""

from __future__ import annotations

import pytest

from fathoms.atomic import replacing, write_atomic


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
