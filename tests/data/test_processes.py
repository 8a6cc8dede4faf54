"""TaskRunner in processes: the batches of threads, and a process that is killed or stopped is replaced or named."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from fathoms.data import (
    Augment,
    AugmentOptions,
    CropOptions,
    DataError,
    EvalTransform,
    Loader,
    LoaderError,
    LoaderOptions,
    MixOptions,
    Sampler,
    TrainTransform,
    open_source,
)
from fathoms.data.loader import CAN_FORK
from fathoms.data.sources.image_folder import FolderSource
from fathoms.errors import ConfigError
from tiny_data import same_batches

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="processes are forked, which is for Linux"),
    # Python 3.12 warns of every fork of a process with threads; the children use none of them.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

HEAVY = AugmentOptions(
    aa="rand-m9-mstd0.5-inc1", color_jitter=0.3, reprob=0.5, mix=MixOptions(mixup=0.8, cutmix=1.0)
)


def train_loader(source, kind="processes", workers=2, resize_on="worker", size=32, max_bad=0.2, **more):
    augment = Augment(HEAVY, classes=len(source.classes))
    transform = TrainTransform(size, CropOptions(), 0, resize_on)
    settings = LoaderOptions(workers=workers, worker_kind=kind, max_bad=max_bad, **more)
    return Loader(source, Sampler(len(source), 8), transform, augment, settings)


def children(loader):
    return loader._processes[1].workers


@pytest.mark.parametrize("resize_on", ["worker", "device"])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_those_of_threads(photo_folder, resize_on, workers):
    source = open_source(photo_folder)
    apart = train_loader(source, workers=workers, resize_on=resize_on)
    threads = train_loader(source, "threads", resize_on=resize_on)
    for epoch in (0, 1):
        assert same_batches(apart.epoch(epoch), threads.epoch(epoch))
    first = [child.pid for child in children(apart)]
    # Left in the middle and resumed from another batch, by the same processes.
    left = apart.epoch(2)
    next(left)
    left.close()
    assert same_batches(apart.epoch(2, start=1), threads.epoch(2, start=1))
    assert [child.pid for child in children(apart)] == first
    assert not apart.stats.accidents


def test_evaluation_hands_out_the_same_pixels(photo_folder):
    source = open_source(photo_folder)
    sampler = Sampler(len(source), 7, order="sequential")
    batches = [
        torch.cat(
            [
                b.images
                for b in Loader(source, sampler, EvalTransform(24), None, LoaderOptions(2, kind)).epoch(0)
            ]
        )
        for kind in ("processes", "threads")
    ]
    assert torch.equal(*batches)


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_epochs_that_are_open_at_once_do_not_meet(photo_folder, kind):
    source = open_source(photo_folder)
    loader, other = train_loader(source, kind), train_loader(source, "threads")
    first = loader.epoch(0)
    begun = [next(first)]
    # The second begins while the first stands still, and ends before it; the third begins in the middle of it.
    assert same_batches(loader.epoch(1), other.epoch(1))
    third = loader.epoch(2)
    begun_third = [next(third)]
    assert same_batches([*begun, *first], other.epoch(0))
    assert same_batches([*begun_third, *third], other.epoch(2))
    assert same_batches(loader.epoch(3), other.epoch(3))


@pytest.mark.parametrize("resize_on", ["worker", "device"])
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_another_size_is_handed_out_from_the_next_epoch_on(photo_folder, kind, resize_on):
    loader = train_loader(open_source(photo_folder), kind, resize_on=resize_on)
    batches = loader.epoch(0)
    sizes = [next(batches).images.shape[-1]]
    loader.set_size(64)
    sizes += [batch.images.shape[-1] for batch in batches]
    assert sizes == [32] * 6
    assert next(loader.epoch(1)).images.shape[-1] == 64


def test_a_loader_that_is_closed_in_the_middle_says_so(photo_folder):
    source = open_source(photo_folder)
    loader = train_loader(source)
    batches = loader.epoch(0)
    next(batches)
    loader.close()
    with pytest.raises(LoaderError, match="have ended"):
        list(batches)
    assert same_batches(loader.epoch(1), train_loader(source, "threads").epoch(1))


def test_many_tasks_for_one_process_do_not_fill_its_pipe(photo_folder):
    source = open_source(photo_folder)
    loader = train_loader(source, workers=1, prefetch=200)
    assert same_batches(loader.epoch(0), train_loader(source, "threads").epoch(0))


def test_bad_images_are_noted_by_the_parent(photo_folder):
    bad = sorted(photo_folder.rglob("*.jpg"))[3]
    bad.write_bytes(bad.read_bytes()[:100])
    source = open_source(photo_folder)
    loader = train_loader(source)
    assert same_batches(loader.epoch(0), train_loader(source, "threads").epoch(0))
    assert len(loader.stats.bad) == 1
    assert bad.name in next(iter(loader.stats.bad))
    with pytest.raises(DataError, match=rf"1 bad images are more than the 0 allowed: .*{bad.name}"):
        list(train_loader(source, max_bad=0.0).epoch(0))


class StuckFolder(FolderSource):
    """A folder in which one file is never read to its end, the first time or every time."""

    stuck = 7

    def __init__(self, root, times):
        super().__init__(root)
        self.once = root / "seen" if times == "once" else None

    def read(self, index: int) -> bytes:
        if index == self.stuck and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            time.sleep(60)
        return super().read(index)


@contextlib.contextmanager
def meanwhile(loader, source, number, times=1):
    """Send a signal to the process that waits at the file, `times` times."""

    def run():
        for _ in range(times):
            found = None
            while found is None:
                time.sleep(0.01)
                here = children(loader) if loader._processes else []
                found = next((c for c in here if c.status.item == source.where(7)), None)
            # It has reported the file and is about to read it: let it begin.
            time.sleep(0.2)
            os.kill(found.pid, number)
            time.sleep(0.6)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.clock
def test_a_process_that_is_killed_is_replaced_and_the_batches_stay_the_same(photo_folder):
    source, began = StuckFolder(photo_folder, "once"), time.monotonic()
    loader = train_loader(source)
    with (
        meanwhile(loader, source, signal.SIGKILL),
        pytest.warns(RuntimeWarning, match=rf"data-worker-\d died at {source.where(7)}; another worker"),
    ):
        batches = list(loader.epoch(0))
    assert time.monotonic() - began < 10
    assert len(loader.stats.accidents) == 1
    assert same_batches(batches, train_loader(open_source(photo_folder), "threads").epoch(0))


@pytest.mark.clock
def test_a_process_that_hangs_is_replaced_and_the_batches_stay_the_same(photo_folder):
    source, began = StuckFolder(photo_folder, "once"), time.monotonic()
    loader = train_loader(source, timeout=1.0)
    with pytest.warns(RuntimeWarning, match=rf"data-worker-\d has hung for .* at {source.where(7)}; another"):
        batches = list(loader.epoch(0))
    assert time.monotonic() - began < 10
    assert same_batches(batches, train_loader(open_source(photo_folder), "threads").epoch(0))


@pytest.mark.clock
def test_a_second_death_stops_the_run_names_the_file_and_leaves_no_process(photo_folder):
    source, began = StuckFolder(photo_folder, "always"), time.monotonic()
    loader = train_loader(source)
    with (
        meanwhile(loader, source, signal.SIGKILL, times=2),
        pytest.warns(RuntimeWarning, match="another worker takes its place"),
        pytest.raises(LoaderError, match=rf"data-worker-\d died at {source.where(7)}, and a worker"),
    ):
        list(loader.epoch(0))
    assert time.monotonic() - began < 10
    assert all(child.ended for child in children(loader))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_error_reaches_the_consumer_with_the_file(photo_folder, monkeypatch, kind):
    source = open_source(photo_folder)
    monkeypatch.setattr(type(source), "read", lambda _source, index: index // 0)
    with pytest.raises(LoaderError, match=r"data-worker-\d at train/.* failed with ZeroDivisionError"):
        list(train_loader(source, kind).epoch(0))


def test_signals_to_a_whole_job_are_left_to_the_loop(photo_folder):
    source = open_source(photo_folder)
    loader = train_loader(source)
    batches = loader.epoch(0)
    first = next(batches)
    for child in children(loader):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(child.pid, number)
    assert same_batches([first, *batches], train_loader(source, "threads").epoch(0))
    assert not loader.stats.accidents


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_end_with_their_loader(photo_folder):
    loader = train_loader(open_source(photo_folder))
    next(loader.epoch(0))
    pids = [child.pid for child in children(loader)]
    assert all(is_running(pid) for pid in pids)
    del loader
    gc.collect()
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.clock
def test_processes_end_when_their_parent_is_killed(photo_folder):
    script = textwrap.dedent(f"""
        import time
        from fathoms.data import CropOptions, Loader, LoaderOptions, Sampler, TrainTransform, open_source
        source = open_source({str(photo_folder)!r})
        loader = Loader(source, Sampler(len(source), 8), TrainTransform(32, CropOptions(), 0), None,
                        LoaderOptions(2, "processes"))
        batches = loader.epoch(0)
        next(batches)
        print(*[child.pid for child in loader._processes[1].workers], flush=True)
        time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def test_auto_takes_threads_where_no_gpu_is_fed(photo_folder, monkeypatch):
    loader = train_loader(open_source(photo_folder), "auto")
    assert loader.worker_kind == "threads"
    loader.device = torch.device("cuda")
    assert loader.worker_kind == "processes"
    assert "processes" in loader.describe()
    loader.transform = EvalTransform(32)
    assert loader.worker_kind == "threads"
    monkeypatch.setattr("fathoms.data.loader.CAN_FORK", False)
    with pytest.raises(ConfigError, match="needs Linux; use threads"):
        LoaderOptions(worker_kind="processes")
