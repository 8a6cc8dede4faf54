"""What all tests share: the same random numbers every time, and kernels on a CPU.

A file that tests kernels is also a script that runs them in Triton's interpreter and prints what it saw.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tiny_runs import ON_DIGITS, ON_IMAGES, TinyRuns, write_images


@pytest.fixture(autouse=True)
def _same_numbers():
    """Whichever tests ran before, so that one that fails once fails again."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """One block, trained on the digits for a moment."""
    from fathoms.cli.main import main

    output = tmp_path_factory.mktemp("runs")
    words = ["--epochs", "3", "--depth", "1", "--lr", "3e-3", "--warmup-epochs", "0", "--device", "cpu"]
    assert main(["train", "--output", str(output), "--experiment", "digits", *words]) == 0
    return output / "digits"


@pytest.fixture(scope="module")
def report(request):
    """What the test's own file prints as a script, with Triton's interpreter on from the first import."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(request.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory):
    """A data set of 256 training and 32 validation images in an .npz file."""
    return write_images(tmp_path_factory.mktemp("images") / "images.npz")


@pytest.fixture
def tiny_runs(tmp_path, tiny_images):
    """Runs on the tiny images; see tests/tiny_runs.py."""
    return TinyRuns(tmp_path, ON_IMAGES, tiny_images)


@pytest.fixture
def digit_runs(tmp_path):
    """Runs on the embedded digits; see tests/tiny_runs.py."""
    return TinyRuns(tmp_path, ON_DIGITS)
