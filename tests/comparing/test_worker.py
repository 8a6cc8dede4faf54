"""A worker's data and compiled code stay from cell to cell, and nothing of a run does."""

import dataclasses
import gc
import json
import shutil

import numpy as np
import pytest
import torch

from fathoms.comparing import runner
from fathoms.comparing.runner import cause_in, task_of
from fathoms.comparing.worker import ResidentData, answer, make_trainer

IMAGES = ("--recipe", "digits", "--image-size", "16", "--patch-size", "4", "--batch-size", "32")
NORMS = ("--axis", "norm=layernorm,dyt", "--seeds", "2")
# Dynamo looks at every tensor's .grad, and torch warns about it.
QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def test_the_data_of_a_second_cell_are_those_of_the_first_where_they_are(comparisons, tiny_images):
    comparisons.data = tiny_images
    first, second = comparisons.make(*IMAGES, *NORMS).cells()[:2]
    data = ResidentData()
    trainers = [make_trainer(cell.job, data.roles(cell.job, cell.fingerprint)) for cell in (first, second)]
    one, two = (trainer.context.data for trainer in trainers)
    assert one.train is not two.train
    for ours, theirs in ((one.train, two.train), (one.val, two.val), (one.test, two.test)):
        assert ours._pixels.data_ptr() == theirs._pixels.data_ptr()
    # A run of its own, such as `fathoms train` makes, has its own.
    assert make_trainer(first.job).context.data.train._pixels.data_ptr() != one.train._pixels.data_ptr()


def test_pixels_leave_the_device_with_their_source(comparisons, tiny_images):
    from fathoms.data import device_loader

    comparisons.data = tiny_images
    cell = comparisons.make(*IMAGES, *NORMS).cells()[0]
    gc.collect()
    before = len(device_loader._RESIDENT)
    trainer = make_trainer(cell.job)
    assert len(device_loader._RESIDENT) == before + 3
    del trainer
    gc.collect()
    assert len(device_loader._RESIDENT) == before


def test_other_data_than_planned_are_a_failure_by_name(comparisons, tiny_images, tmp_path):
    comparisons.data = tmp_path / "own.npz"
    shutil.copyfile(tiny_images, comparisons.data)
    cell = comparisons.make(*IMAGES, *NORMS).cells()[0]
    arrays = dict(np.load(tiny_images))
    arrays["x_train"] = arrays["x_train"][::-1].copy()
    np.savez(comparisons.data, **arrays)
    result = answer(task_of(cell), ResidentData())
    assert result["status"] == "failed"
    assert "the data changed since the comparison was planned" in result["reason"]
    assert not cell.folder.exists()


def test_a_trial_of_tuning_never_sees_the_test_set(comparisons):
    comparison = comparisons.make(*NORMS, "--tune", "lr=1e-3,3e-3", "--tune-epochs", "1")
    trial, cell = comparison.trials()[0].cell, comparison.cells()[0]
    data = ResidentData()
    assert answer(task_of(trial), data)["status"] == "done"
    rows = [json.loads(line) for line in (trial.folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["split"] for row in rows} == {"train", "val"}
    assert json.loads((trial.folder / "summary.json").read_text())["test"] is None
    # The cell after it, in the same worker, does.
    assert answer(task_of(cell), data)["status"] == "done"
    assert json.loads((cell.folder / "summary.json").read_text())["test"]["images"] == 359


@pytest.mark.slow
@pytest.mark.compile
@QUIET
def test_a_second_cell_of_an_architecture_compiles_nothing(comparisons, monkeypatch):
    """Also when its seed and its lr differ; another architecture does."""
    words = ("--torchcompile", "aot_eager", "--epochs", "1", "--seeds", "2", "--axis", "lr=1e-3,2e-3")
    for scope in ("model", "blocks"):
        monkeypatch.setattr("fathoms.training.speed.compile_scope", lambda _job, scope=scope: scope)
        cells = comparisons.make(*words, name=scope).cells()
        assert len({cell.architecture for cell in cells}) == 1
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        data, seen = ResidentData(), []
        for cell in cells[::3]:
            result = answer(task_of(cell), data)
            assert result["status"] == "done", result
            seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert seen[0] > 0
        assert seen[0] == seen[1]
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.compile
@QUIET
def test_a_recompile_limit_fails_the_cell_instead_of_falling_back(comparisons, monkeypatch):
    # Blocks raise the limit by their number.
    monkeypatch.setattr("fathoms.training.speed.compile_scope", lambda _job: "model")
    words = ("--torchcompile", "aot_eager", "--epochs", "1", "--seeds", "1")
    first, second = comparisons.make(*words, "--axis", "depth=1,2").cells()
    torch._dynamo.reset()
    data = ResidentData()
    assert answer(task_of(first), data)["status"] == "done"
    with torch._dynamo.config.patch(recompile_limit=1):
        result = answer(task_of(second), data)
    assert result["status"] == "failed"
    assert result["broken"]
    assert "recompile" in result["reason"]
    torch._dynamo.reset()


def test_architectures_differ_where_compiled_code_does(comparisons):
    cell = comparisons.make(*NORMS).cells()[0]

    def changed(**recipe):
        return dataclasses.replace(
            cell, job=dataclasses.replace(cell.job, recipe=dataclasses.replace(cell.job.recipe, **recipe))
        )

    assert changed(lr=0.5).architecture == cell.architecture
    assert changed(grad_checkpointing=True).architecture != cell.architecture
    swapped = dataclasses.replace(cell.job.run, swap_norms="dyt")
    other = dataclasses.replace(cell, job=dataclasses.replace(cell.job, run=swapped))
    assert other.architecture != cell.architecture


@pytest.mark.slow
def test_a_worker_is_renewed_after_many_cells(comparisons, monkeypatch):
    started = []

    class Counted(runner.Worker):
        def __init__(self, *words):
            super().__init__(*words)
            started.append(self.process.pid)

    monkeypatch.setattr(runner, "Worker", Counted)
    monkeypatch.setattr(runner, "CELLS_PER_WORKER", 1)
    assert comparisons.run("--axis", "norm=layernorm,dyt", "--seeds", "1", "--jobs", "1") == 0
    assert len(set(started)) == 2


ABORTED = """RuntimeWarning: something long before
/aten/src/ATen/native/cuda/Indexing.cu:1553: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < size` failed.
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
Exception raised from c10_cuda_check_implementation at /c10/cuda/CUDAException.cpp:44 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f)
frame #28: _start + 0x25 (0x55)
"""
FAULT = """Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "threading.py", line 359 in wait
Current thread 0x00007e (most recent call first):
  <no Python frame>
Extension modules: numpy._core (total: 1)
"""
RAISED = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    ~^^\nMemoryError: host\n'
)


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        (ABORTED, "CUDA error: device-side assert triggered"),
        (
            ABORTED.replace("CUDA error: device-side assert triggered", "CUDA out of memory."),
            "CUDA out of memory.",
        ),
        (FAULT, "Fatal Python error: Segmentation fault"),
        (RAISED, "MemoryError: host"),
        ("loading\nstill loading\n", "still loading"),
        ("frame #1: main + 0x2\n", ""),
        ("", ""),
    ],
)
def test_a_dead_worker_is_explained_by_the_line_with_the_cause_and_never_by_a_stack_frame(printed, cause):
    assert cause_in(printed) == cause
