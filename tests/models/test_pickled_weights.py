"""Other people's pickles: their tensors come out, their code never runs."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fathoms import FathomsError
from fathoms.models.pickled_weights import convert
from fathoms.models.unpickle import INERT


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_tensors_come_out_and_the_rest_is_named(tmp_path):
    shared = torch.arange(6.0)
    state = {
        "a.weight": shared.view(2, 3),
        "a.tied": shared.view(2, 3),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    torch.save({"model": state, "epoch": 7, "optimizer": {"lr": 0.1}}, tmp_path / "run.pth")
    report = convert(tmp_path / "run.pth", tmp_path / "run.safetensors")
    assert (report.tensors, report.parameters, report.dtypes, report.taken) == (
        3,
        14,
        ("bfloat16", "float32"),
        "model",
    )
    assert report.top == ("model: dict of 3", "epoch: int", "optimizer: dict of 1")
    loaded = load_file(tmp_path / "run.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.pth", "run.safetensors"]


@pytest.mark.parametrize(
    ("zipped", "weights", "saved"),
    [
        (False, "model", {"optimizer": {"state": {}, "param_groups": []}, "lr_scheduler": {}, "scaler": {}}),
        (True, "state_dict", {"arch": "visiontransformer", "version": 2, "amp_scaler": {}, "metric": 78.77}),
    ],
    ids=["deit", "learnable_scaler"],
)
def test_a_checkpoint_with_training_arguments_is_read_as_data(tmp_path, zipped, weights, saved):
    """The files that DeiT's main.py and LearnableScaler's saver (timm's) write, arguments included."""
    args = argparse.Namespace(lr=0.005, opt="lamb", betas=None, crop=[0.08, 1.0], device=torch.device("cpu"))
    state = OrderedDict({"_orig_mod.norm.a": torch.arange(3.0)})
    checkpoint = {weights: state, "epoch": 299, **saved, "args": args}
    torch.save(checkpoint, tmp_path / "run.pth", _use_new_zipfile_serialization=zipped)
    report = convert(tmp_path / "run.pth", tmp_path / "run.safetensors")
    assert (report.tensors, report.taken) == (1, weights)
    assert "args: Namespace of 5" in report.top
    assert load_file(tmp_path / "run.safetensors")["_orig_mod.norm.a"].equal(torch.arange(3.0))


@pytest.mark.parametrize("zipped", [False, True])
def test_numbers_and_arrays_of_numpy_are_data(tmp_path, zipped):
    """LambdaLR leaves a numpy number as `lr` in every checkpoint of the author's `--sched custom`."""
    square = np.arange(6.0).reshape(2, 3)
    arrays = {
        "b": square,
        "c": np.asfortranarray(square.astype("f4")),
        "d": np.zeros((0, 3)),
        "e": np.array([True]),
    }
    others = {"lr": np.float64(0.1), "epoch": np.int64(3), "metric": np.float32(2.5), "nan": np.bool_(True)}
    checkpoint = {"state_dict": {"a": torch.ones(2), **arrays}, "optimizer": others, **others}
    torch.save(checkpoint, tmp_path / "last.pth.tar", _use_new_zipfile_serialization=zipped)
    report = convert(tmp_path / "last.pth.tar", tmp_path / "last.safetensors")
    assert report.top[2:] == ("lr: float", "epoch: int", "metric: float", "nan: bool")
    loaded = load_file(tmp_path / "last.safetensors")
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in arrays.items())
    assert {str(value.dtype) for value in loaded.values()} == {"torch.float32", "torch.float64", "torch.bool"}


@pytest.mark.parametrize("odd", [np.array([Evil("x")]), np.array(["text"]), np.arange(3).astype(">i4")])
def test_an_array_of_anything_but_numbers_is_refused(tmp_path, odd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"a": torch.ones(2)}, "odd": odd}, tmp_path / "odd.pth")
    with pytest.raises(
        FathomsError, match=r"are not numbers|not in this machine's byte order|wants to run code"
    ):
        convert(tmp_path / "odd.pth", tmp_path / "odd.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd.pth"]


class Disguised(argparse.Namespace):
    """A namespace whose pickle does not just list names and values."""

    def __init__(self, reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "reduced",
    [
        (argparse.Namespace, ("positional",)),
        (argparse.Namespace, (), (None, {"__class__": OrderedDict})),
        (argparse.Namespace, (), [("a", 1)]),
        (argparse.ArgumentParser, ()),
        (argparse.FileType, ("w",)),
    ],
    ids=["arguments", "slots", "list", "parser", "file"],
)
def test_a_namespace_is_names_and_values_and_nothing_else(tmp_path, reduced):
    torch.save({"model": {"a": torch.ones(2)}, "args": Disguised(reduced)}, tmp_path / "odd.pth")
    with (
        torch.serialization.safe_globals(INERT),
        pytest.raises((pickle.UnpicklingError, TypeError, ValueError)),
    ):
        torch.load(tmp_path / "odd.pth", weights_only=True)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_pickle_that_wants_to_run_code_is_refused_and_runs_none(tmp_path, form):
    sentinel = tmp_path / "sentinel"
    if form == "torch":
        torch.save({"model": {"a": torch.ones(2)}, "x": Evil(sentinel)}, tmp_path / "evil.pth")
    else:
        (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil(sentinel)))
    with pytest.raises(FathomsError, match="this file wants to run code when it is opened"):
        convert(tmp_path / "evil.pth", tmp_path / "evil.safetensors")
    assert not sentinel.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pth"]


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(50 << 20))
    assert (tmp_path / "bomb.pth").stat().st_size < 1 << 20
    with pytest.raises(FathomsError, match=r"it unpacks to 0.1 GB, more than --max-gb allows"):
        convert(tmp_path / "bomb.pth", tmp_path / "bomb.safetensors", max_gb=0.01)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("no.pth", "x.safetensors", "no such file"),
        ("x.safetensors", "y.safetensors", "already a safetensors file"),
        ("x.pth", "x.bin", "written as .safetensors; change the ending"),
        ("x.pth", "no/x.safetensors", "the folder does not exist"),
    ],
)
def test_mistakes_are_said_before_anything_is_opened(tmp_path, source, target, message):
    for name in ("x.pth", "x.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(FathomsError, match=message):
        convert(tmp_path / source, tmp_path / target)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_gb": float("nan")}, "--max-gb nan: use 0.001 to 1000000"),
        ({"max_gb": float("inf")}, "--max-gb inf: use"),
        ({"max_gb": -1.0}, "--max-gb -1.0: use"),
        ({"seconds": -5}, "--seconds -5: use 1 to 1000000000"),
    ],
)
def test_a_limit_that_limits_nothing_is_refused(tmp_path, limit, message):
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pth")
    with pytest.raises(FathomsError, match=message):
        convert(tmp_path / "x.pth", tmp_path / "x.safetensors", **limit)


def test_junk_is_no_checkpoint_and_the_process_has_no_network_and_a_limit(tmp_path):
    (tmp_path / "junk.pth").write_bytes(b"hello")
    with pytest.raises(FathomsError, match="it is not a readable checkpoint"):
        convert(tmp_path / "junk.pth", tmp_path / "junk.safetensors")
    code = (
        "import resource, socket; from fathoms.models import unpickle; unpickle.cut_network(); "
        "unpickle.limit(9 << 30, 60, 1000); print(resource.getrlimit(resource.RLIMIT_FSIZE)[0]); socket.socket()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1000\n"
    assert "no network while an untrusted file is open" in done.stderr
