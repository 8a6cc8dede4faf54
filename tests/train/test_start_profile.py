"""The start of a run: its profile, the caches of the compiler, and what is not imported."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

import fathoms
from fathoms.cli.main import main
from fathoms.data import DataError
from fathoms.ops.dispatch import constant_to_compiler
from fathoms.train.job import Job
from fathoms.train.optim.build import build_optimizer
from fathoms.train.optim.plain import PlainOptimizer
from fathoms.train.precision.compile_cache import CACHE, compile_cache, keep_compiled_code
from fathoms.train.quick_start import open_meanwhile, without_collection
from fathoms.train.recipe.recipe import Recipe
from fathoms.train.record.start_profile import StartProfile, age_of_process


def test_the_profile_of_a_run_is_printed_and_kept(digit_runs, capsys):
    torch.set_num_threads(1)
    assert main(["train", *digit_runs.words("--profile-start", "--epochs", "1")]) == 0
    kept = json.loads((digit_runs.folder() / "start.json").read_text())
    names = [
        "imports",
        "device",
        "compiler",
        "data",
        "model",
        "optimizer and copies",
        "run folder",
        "first batch",
    ]
    names += ["first update", "warm-up updates", "first evaluation", "first checkpoint", "training", "report"]
    assert list(kept["phases"]) == names
    ended = [phase["ended"] for phase in kept["phases"].values()]
    assert ended == sorted(ended)
    assert "phase                 seconds  since the command" in capsys.readouterr().err


def test_a_phase_counts_once():
    start = StartProfile()
    assert 0 < age_of_process() < 24 * 3600
    for _ in range(2):
        start.mark("one")
        with start.phase("two"):
            pass
    first = dict(start.rows)
    start.mark("one")
    assert start.rows == first
    assert list(first) == ["one", "two"]


def test_compiled_code_is_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    assert os.environ[CACHE] == str(tmp_path / "fathoms" / "inductor")
    assert compile_cache().stat().st_mode & 0o077 == 0
    monkeypatch.setenv(CACHE, str(tmp_path / "own"))
    assert compile_cache() == tmp_path / "own"


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="compiled code is not kept there"):
        keep_compiled_code()
    assert CACHE not in os.environ


def test_a_function_is_marked_as_torch_marks_it():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(constant_to_compiler(ours)) == vars(torch.compiler.assume_constant_result(theirs))


def test_the_loop_is_imported_without_the_compiler():
    code = "import fathoms.train.trainer, sys; print([m for m in ('torch._dynamo', 'sympy', 'triton', 'sklearn', "
    code += "'torch.distributed.tensor') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_that_compiles_nothing_never_imports_the_compiler(digit_runs):
    words = digit_runs.words("--epochs", "1", "--opt", "adamw")
    code = f"""
import sys
import fathoms
from fathoms.cli.main import main
from fathoms.train.quick_start import open_meanwhile, without_collection
from fathoms.data import DataError
assert main(["train", *{words!r}]) == 0
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd", "momentum", "lamb"])
def test_an_optimizer_is_torchs_without_the_decorators(name):
    model = fathoms.create_model("vit_digits", depth=1)
    optimizer = build_optimizer(fathoms.param_groups(model, weight_decay=0.1), name, lr=0.1)
    assert isinstance(optimizer, PlainOptimizer)
    assert optimizer.add_param_group.__func__.__module__ == "torch.optim.optimizer"
    assert optimizer.add_param_group.__func__ is not torch.optim.Optimizer.add_param_group


def test_garbage_is_searched_for_again_after_the_imports():
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_one_file_is_opened_meanwhile_and_its_error_is_raised_where_it_is_needed(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"not a zip")
    result = open_meanwhile(Job(str(tmp_path / "bad.npz"), "vit_digits", None, Recipe()))
    with pytest.raises(DataError, match="bad.npz"):
        result()
    assert open_meanwhile(Job(str(tmp_path), "vit_digits", None, Recipe()))() is None
