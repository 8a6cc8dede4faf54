"""What a run takes from its data and its machine: the rule, its record, and the memory that it announces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

from fathoms.cli.main import main
from fathoms.training import defaults
from fathoms.training.defaults import CPU_CORE, GPU, chosen


@pytest.mark.parametrize(
    ("images", "side", "limits", "given", "expected"),
    [
        (
            2000,
            64,
            CPU_CORE,
            {},
            {"image_size": 64, "patch_size": 8, "dim": 192, "epochs": 25, "batch_size": 32},
        ),
        (
            5000,
            32,
            CPU_CORE,
            {},
            {"image_size": 32, "patch_size": 4, "epochs": 10, "batch_size": 128, "aa": None},
        ),
        (5000, 500, CPU_CORE, {}, {"image_size": 64, "patch_size": 8}),
        (5000, 500, GPU, {}, {"image_size": 224, "patch_size": 16, "dim": 384, "heads": 6, "epochs": 200}),
        (1_281_167, 400, GPU, {}, {"image_size": 224, "epochs": 30, "batch_size": 512, "warmup_epochs": 3.0}),
        (
            50,
            33,
            GPU,
            {},
            {
                "image_size": 32,
                "patch_size": 4,
                "batch_size": 16,
                "epochs": 200,
                "aa": "rand-m6-n1-mstd0.5-inc1",
            },
        ),
        (7, 3, GPU, {}, {"image_size": 2, "patch_size": 2, "batch_size": 16, "epochs": 200}),
        (900, 8, CPU_CORE, {}, {"image_size": 8, "patch_size": 2, "batch_size": 16}),
        (900, 300, CPU_CORE, {"image_size": 96, "dim": 50}, {"patch_size": 16, "dim": 50, "heads": 1}),
        (
            900,
            100,
            GPU,
            {"patch_size": 10, "epochs": 4},
            {"image_size": 100, "epochs": 4, "warmup_epochs": 0.4},
        ),
    ],
)
def test_sizes_follow_from_the_images_and_the_device(images, side, limits, given, expected):
    values = chosen(images, side, limits, given)
    assert {name: values[name] for name in expected} == expected
    assert values["image_size"] <= max(side, given.get("image_size", 0)), "no image is enlarged"
    assert values["image_size"] % values["patch_size"] == 0
    assert values["dim"] % values["heads"] == 0


@pytest.fixture
def pictures(tmp_path):
    """64 images of 20 pixels in two classes."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (96, 20, 20, 3), np.uint8), np.arange(96) % 2
    arrays = {"x_train": images[:64], "y_train": labels[:64], "x_val": images[64:], "y_val": labels[64:]}
    np.savez(tmp_path / "pictures.npz", **arrays)
    return str(tmp_path / "pictures.npz")


def test_a_run_goes_on_as_it_was_recorded_on_another_machine(pictures, tmp_path, monkeypatch, capsys):
    words = [
        "train",
        pictures,
        "--epochs",
        "1",
        "--depth",
        "1",
        "--dim",
        "16",
        "--output",
        str(tmp_path / "runs"),
    ]
    words += ["--device", "cpu"]
    assert main(words) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    table = tomllib.loads((folder / "config.toml").read_text())
    size = {name: table["model"][name] for name in ("image_size", "patch_size", "dim", "depth")}
    assert size == {"image_size": 20, "patch_size": 4, "dim": 16, "depth": 1}
    monkeypatch.setattr(defaults, "limits_of", lambda _: GPU)
    monkeypatch.setattr(defaults, "free_memory", lambda _: 1e5)
    capsys.readouterr()
    assert main(words) == 0
    assert "nothing is left to train" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]


def test_a_batch_fits_into_half_of_the_free_memory(pictures, monkeypatch):
    monkeypatch.setattr(defaults, "free_memory", lambda _: 150e6)
    run = defaults.RunOptions(device="cpu")
    small = defaults.starting_table(pictures, run, {"batch_size": 64})
    assert (small["batch_size"], small["model"]["image_size"]) == (64, 20), "what the user gave stays"
    monkeypatch.setattr(defaults, "chosen", lambda *words: {**chosen(*words), "batch_size": 64})
    assert 1 <= defaults.starting_table(pictures, run, {})["batch_size"] < 64


MEMORY = """
import re, resource, sys, threading, time
from pathlib import Path
from fathoms.cli.main import main
peak, before = [0], [0]
def size():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
def watch():
    while True:
        peak[0] = max(peak[0], size())
        time.sleep(0.002)
from fathoms.training import run
begin = run.Loop.begin
def begun(loop):
    before[0] = size()
    peak[0] = 0
    threading.Thread(target=watch, daemon=True).start()
    begin(loop)
run.Loop.begin = begun
update = run.Loop.update
def counted(loop, batch):
    update(loop, batch)
    if loop.state.updates == 3:
        loop.stop.code = 143
run.Loop.update = counted
main(["train", *sys.argv[1:]])
print(peak[0] - before[0])
"""


def test_the_announced_memory_is_that_of_the_run(tmp_path):
    """Held to a fifth in a process of its own: the weights are there before, all else comes with the first updates."""
    words = ["--batch-size", "256", "--depth", "12", "--dim", "128", "--heads", "2", "--device", "cpu"]
    line = [sys.executable, "-c", MEMORY, *words, "--output", str(tmp_path)]
    done = subprocess.run(
        line, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    announced = float(re.search(r"cost: about ([\d.]+) GB of memory", done.stderr)[1])
    assert int(done.stdout.splitlines()[-1]) / 1e9 == pytest.approx(announced, rel=0.2)
