"""Checkpoints on disk and in the background: the file format, what is kept, and what happens when saving fails."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fathoms.errors import FathomsError
from fathoms.training import checkpoint_files as checkpoints
from fathoms.training import checkpoint_save as saver_module
from fathoms.training.checkpoint_files import NAMES, Checkpoint, write_tensors
from fathoms.training.checkpoint_load import read as read_checkpoint
from fathoms.training.checkpoint_save import AsyncSaver
from fathoms.training.run_folder import RunFolder


@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_tensor_files_are_safetensors_and_hashed_as_written(tmp_path, dtype):
    torch.manual_seed(0)
    tensors = {
        "ünicode/ä": (10 * torch.randn(3, 5)).to(dtype),
        "count": torch.tensor(7).to(dtype),
        "half": torch.randn(3).half(),
        "none": torch.zeros(0, 4, dtype=dtype),
    }
    digest = write_tensors(tmp_path / "ours.safetensors", tensors)
    assert digest == hashlib.sha256((tmp_path / "ours.safetensors").read_bytes()).hexdigest()
    back = load_file(tmp_path / "ours.safetensors")
    assert back.keys() == tensors.keys()
    assert all(
        back[key].dtype == value.dtype and torch.equal(back[key], value) for key, value in tensors.items()
    )


def kept(updates):
    return Checkpoint({"model": {"w": torch.full((4,), float(updates))}}, {"updates": updates})


def updates_in(folder):
    assert checkpoints.why_unusable(folder) is None
    return json.loads((folder / "state.json").read_text())["updates"]


@pytest.fixture
def folder(tmp_path):
    opened = RunFolder(tmp_path / "run")
    opened.open()
    yield opened
    opened.close()


def names(folder):
    return sorted(path.name for path in folder.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (1, ["best", "last"]),
        (2, ["best", "last", "previous"]),
        (4, ["best", "last", "previous", "update-00000003", "update-00000004"]),
    ],
)
def test_as_many_are_kept_as_asked_for_and_the_best(folder, keep, left):
    saver = AsyncSaver(folder, keep, torch.device("cpu"))
    for updates in range(1, 7):
        saver.save(lambda _stage, number=updates: kept(number), best=updates == 2)
    saver.wait()
    assert names(folder) == left
    assert updates_in(folder.checkpoints / "last") == 6
    assert updates_in(folder.checkpoints / "best") == 2
    assert checkpoints.newest(folder.checkpoints) == folder.checkpoints / "last"


def test_training_continues_while_one_is_written_and_only_one_at_a_time(folder, monkeypatch):
    gate, running, most = threading.Event(), [], []
    save = checkpoints.save

    def slow(*args):
        running.append(1)
        most.append(len(running))
        gate.wait(20)
        save(*args)
        running.pop()

    monkeypatch.setattr(saver_module.checkpoints, "save", slow)
    saver = AsyncSaver(folder, 2, torch.device("cpu"))
    weights = torch.ones(3)
    saver.save(lambda stage: Checkpoint({"model": {"w": stage(weights)}}, {"updates": 1}))
    # The thread stands still, and training changes the weights: the copy must not.
    weights.add_(5)
    saver.check()
    assert not (folder.checkpoints / "last").exists()
    gate.set()
    saver.save(lambda stage: Checkpoint({"model": {"w": stage(weights)}}, {"updates": 2}))
    saver.wait()
    assert max(most) == 1
    before, after = (
        load_file(folder.checkpoints / name / "model.safetensors")["w"] for name in ("previous", "last")
    )
    assert (before.tolist(), after.tolist()) == ([1, 1, 1], [6, 6, 6])


def test_an_error_of_the_thread_is_raised_in_training(folder, monkeypatch):
    def fail(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saver_module.checkpoints, "save", fail)
    saver = AsyncSaver(folder, 2, torch.device("cpu"))
    saver.save(lambda _stage: kept(1))
    saver.close()
    with pytest.raises(
        FathomsError, match="cannot save: Permission denied; fix it and give the same command"
    ):
        saver.check()
    saver.check()


def test_an_error_of_the_thread_that_nobody_foresaw_keeps_its_cause(folder, monkeypatch):
    def fail(*_args):
        raise KeyError("w")

    monkeypatch.setattr(saver_module.checkpoints, "save", fail)
    saver = AsyncSaver(folder, 2, torch.device("cpu"))
    saver.save(lambda _stage: kept(1))
    saver.close()
    with pytest.raises(
        FathomsError, match=r"cannot save: an error that .* did not foresee \('w'\); rep"
    ) as raised:
        saver.check()
    assert isinstance(raised.value.__cause__, KeyError)


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_left(folder, monkeypatch):
    """F12; the folder is renamed first, so that it is never mistaken for a checkpoint."""
    warned = []
    saver = AsyncSaver(folder, 1, torch.device("cpu"), warned.append)
    saver.save(lambda _stage: kept(1))
    saver.wait()
    rmtree = checkpoints.shutil.rmtree

    def stubborn(path, ignore_errors=False):
        if checkpoints.TRASH in str(path):
            raise PermissionError(13, "Permission denied")
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(checkpoints.shutil, "rmtree", stubborn)
    saver.save(lambda _stage: kept(2))
    saver.wait()
    assert len(warned) == 1
    assert "an old checkpoint cannot be deleted (Permission denied)" in warned[0]
    assert updates_in(folder.checkpoints / "last") == 2
    monkeypatch.undo()
    checkpoints.clean_up(folder.checkpoints)
    assert names(folder) == ["last"]


def test_the_same_update_may_be_saved_again(folder):
    """A signal right after a save saves it a second time; the older one of two makes room for the newer."""
    for updates in (1, 2, 2, 2, 3, 4):
        checkpoints.save(folder.checkpoints, kept(updates), keep=4)
    assert names(folder) == ["last", "previous", "update-00000001", "update-00000002"]


@pytest.mark.parametrize("older_best", [False, True])
def test_what_a_killed_save_leaves_is_cleared_and_a_nameless_best_gets_its_name(folder, older_best):
    """Killed while the best of before was set aside, or when it had not been touched yet."""
    place = folder.checkpoints
    if older_best:
        checkpoints.save(place, kept(0), keep=1, best=True)
        (place / "best").rename(place / "before")
    checkpoints.save(place, kept(1), keep=1, best=True)
    (place / "best").rename(place / checkpoints.FRESH_BEST)
    if older_best:
        (place / "before").rename(place / "best")
    checkpoints.write(place / checkpoints.FRESH, kept(2))
    (place / checkpoints.FRESH / checkpoints.MANIFEST).unlink()
    (place / f"{checkpoints.TRASH}1").mkdir()
    checkpoints.clean_up(place)
    assert names(folder) == ["best", "last"]
    assert updates_in(place / "best") == 1
    assert checkpoints.newest(place) == place / "last"


class Killed(BaseException):
    """Stands for a kill: nothing is cleaned up."""


def killed_after(monkeypatch, renames, save):
    """Save, and stop after a number of renames; whether it was cut short."""
    rename, left = Path.rename, iter(range(renames))

    def counted(path, target):
        if next(left, None) is None:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", counted)
    try:
        save()
    except Killed:
        return True
    finally:
        monkeypatch.undo()
    return False


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_two_kills_in_a_row_lose_nothing_but_what_was_under_way(folder, monkeypatch, keep):
    """At every pair of places between two renames; each is the best so far, and `best` follows."""
    place, cuts = folder.checkpoints, 0
    for places in itertools.product(range(8), repeat=2):
        for path in place.iterdir():
            shutil.rmtree(path)
        for updates in (1, 2):
            checkpoints.save(place, kept(updates), keep, best=True)
        whole = 2
        for updates, renames in zip((3, 4), places, strict=True):
            again = functools.partial(checkpoints.save, place, kept(updates), keep, best=True)
            cut = killed_after(monkeypatch, renames, again)
            checkpoints.clean_up(place)
            now = updates_in(checkpoints.newest(place))
            assert now in ((whole, updates) if cut else (updates,))
            assert updates_in(place / "best") == now
            whole, cuts = now, cuts + cut
    assert cuts > 60


def test_a_damaged_last_makes_way_and_does_not_cost_the_whole_one(folder, monkeypatch):
    place = folder.checkpoints
    for places in range(4):
        for path in place.iterdir():
            shutil.rmtree(path)
        for updates in (1, 2):
            checkpoints.save(place, kept(updates))
        (place / "last" / "state.json").write_text("{}")
        with pytest.warns(UserWarning, match="damaged"):
            whole = checkpoints.newest(place)
        checkpoints.drop_damaged(place, whole)
        cut = killed_after(monkeypatch, places, functools.partial(checkpoints.save, place, kept(3)))
        checkpoints.clean_up(place)
        assert updates_in(checkpoints.newest(place)) == (1 if cut else 3)


@pytest.mark.parametrize("file", ["state.json", "model.safetensors"])
def test_a_link_to_the_right_file_is_not_read_as_part_of_a_checkpoint(folder, tmp_path, file):
    for updates in (1, 2):
        checkpoints.save(folder.checkpoints, kept(updates))
    path = folder.checkpoints / "last" / file
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FathomsError, match=f"{file} is not a regular file"):
        read_checkpoint(folder.checkpoints / "last")
    with pytest.warns(UserWarning, match="damaged"):
        assert checkpoints.newest(folder.checkpoints).name == "previous"


def test_no_room_for_a_best_costs_no_last_and_is_tried_again(folder, monkeypatch):
    """On a file system without second names a best is a copy."""
    refused, copyfile = [], shutil.copyfile

    def no_names(_target, _source):
        raise PermissionError(1, "Operation not permitted")

    def full(source, target):
        if len(refused) < 1:
            refused.append(target)
            raise OSError(28, "No space left on device")
        return copyfile(source, target)

    warned = []
    saver = AsyncSaver(folder, 2, torch.device("cpu"), warned.append)
    monkeypatch.setattr(Path, "hardlink_to", no_names)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(folder.checkpoints, kept(1), best=True)
    assert names(folder) == ["last"]
    refused.clear()
    saver.save(lambda _stage: kept(2), best=True)
    saver.wait()
    assert "removing older checkpoints and trying once more" in warned[0]
    assert updates_in(folder.checkpoints / "best") == updates_in(folder.checkpoints / "last") == 2
