"""The start of a run: the caches of the compiler, and what is not imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fathoms.ops.dispatch import constant_to_compiler
from fathoms.training.compiling import CACHE, compile_cache, keep_compiled_code


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


@pytest.mark.compile
def test_a_run_that_compiles_keeps_its_code(tiny_runs, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, "")
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny_runs.trainer("--torchcompile", "eager")
    assert os.environ[CACHE] == str(tmp_path / "fathoms" / "inductor")


def test_a_function_is_marked_as_torch_marks_it():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(constant_to_compiler(ours)) == vars(torch.compiler.assume_constant_result(theirs))


def test_the_compiler_is_imported_neither_with_the_loop_nor_by_a_run_that_compiles_nothing(digit_runs):
    words = digit_runs.words("--epochs", "1", "--opt", "adamw")
    code = f"""
import sys
import fathoms.training.run
heavy = ["torch._dynamo", "torch._inductor", "sympy", "triton", "sklearn", "torch.distributed.tensor"]
print([name for name in heavy if name in sys.modules])
from fathoms.cli.main import main
assert main(["train", *{words!r}]) == 0
print([name for name in heavy[:3] if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("[]", "[]")


def test_a_job_is_described_without_importing_torch():
    code = (
        "import sys; import fathoms.training.job, fathoms.training.recipe; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
