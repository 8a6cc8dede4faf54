"""The loader: same batches for any number of workers, resumable, and honest about bad files and workers."""

import ctypes
import os
import threading
import time

import numpy as np
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
from fathoms.data.sampler import LoaderStats
from fathoms.data.sources.image_folder import FolderSource
from fathoms.data.workers import TaskRunner
from tiny_data import same_batches

HEAVY = AugmentOptions(
    aa="rand-m9-mstd0.5-inc1", reprob=0.5, remode="pixel", mix=MixOptions(mixup=0.8, cutmix=1.0)
)


def train_loader(source, workers=2, batch=8, seed=0, options=HEAVY, resize_on="worker", timeout=60.0, **more):
    augment = Augment(options, seed=seed, classes=len(source.classes))
    sampler = Sampler(len(source), batch, seed=seed, **more)
    settings = LoaderOptions(workers=workers, max_bad=0.2, timeout=timeout)
    return Loader(source, sampler, TrainTransform(32, CropOptions(), seed, resize_on), augment, settings)


@pytest.mark.parametrize("resize_on", ["worker", "device"])
def test_batches_do_not_depend_on_the_number_of_workers(photo_folder, resize_on):
    source = open_source(photo_folder)
    one = list(train_loader(source, 1, resize_on=resize_on).epoch(2))
    assert same_batches(one, train_loader(source, 5, resize_on=resize_on).epoch(2))
    assert len(one) == 6
    assert one[0].images.shape == (8, 3, 32, 32)
    assert one[0].images.dtype == torch.float32
    # The control: another epoch and another seed give other batches.
    assert not same_batches(one, train_loader(source, 1, resize_on=resize_on).epoch(3))
    assert not same_batches(one, train_loader(source, 1, seed=1, resize_on=resize_on).epoch(2))


def test_an_epoch_resumes_in_the_middle(photo_folder):
    source = open_source(photo_folder)
    whole = list(train_loader(source).epoch(1))
    epoch, number = whole[2].next_position
    assert same_batches(whole[3:], train_loader(source, 3).epoch(epoch, start=number))
    assert list(train_loader(source).epoch(1, start=6)) == []
    with pytest.raises(DataError, match="outside the epoch of 6 batches"):
        next(train_loader(source).epoch(1, start=7))


def test_a_sample_s_augmentation_does_not_depend_on_its_batch(photo_folder):
    source = open_source(photo_folder)
    options = AugmentOptions(aa="rand-m9-mstd0.5-inc1", reprob=0.5, remode="pixel", color_jitter=0.4)
    by_id = {}
    for batch_size in (8, 12):
        for batch in train_loader(source, batch=batch_size, options=options).epoch(0):
            for number, image in zip(batch.ids.tolist(), batch.images, strict=True):
                assert torch.equal(by_id.setdefault(number, image), image)
    assert len(by_id) == 48


def test_two_ranks_make_the_global_batch_of_one(photo_folder):
    source = open_source(photo_folder)
    options = AugmentOptions(aa="rand-m9-mstd0.5-inc1")
    whole = next(train_loader(source, batch=8, options=options).epoch(0))
    parts = [
        next(train_loader(source, batch=4, options=options, world=2, rank=rank).epoch(0)) for rank in (0, 1)
    ]
    place = {number: row for row, number in enumerate(whole.ids.tolist())}
    assert sorted(torch.cat([part.ids for part in parts]).tolist()) == sorted(place)
    for part in parts:
        rows = [place[number] for number in part.ids.tolist()]
        assert torch.equal(part.images, whole.images[rows])
        assert torch.equal(part.labels, whole.labels[rows])


def test_repeats_of_a_sample_are_augmented_differently(photo_folder):
    batch = next(
        train_loader(open_source(photo_folder), options=AugmentOptions(), batch=6, aug_repeats=3).epoch(0)
    )
    assert batch.ids.tolist()[0] == batch.ids.tolist()[2]
    assert not torch.equal(batch.images[0], batch.images[1])


def test_resizing_on_the_device_gives_the_worker_s_pixels(photo_folder):
    source, plain = open_source(photo_folder), AugmentOptions(mean=(0.0, 0.0, 0.0), std=(1 / 255,) * 3)
    worker = next(train_loader(source, options=plain).epoch(0))
    device = next(train_loader(source, options=plain, resize_on="device").epoch(0))
    # Both round to bytes after each direction; torch's fixed-point weights are off by up to two levels.
    difference = (worker.images - device.images).abs()
    assert difference.max() <= 2.01
    assert difference.mean() < 0.02


@pytest.mark.parametrize("mode", ["resized", "pad", "whole"])
def test_large_images_are_shrunk_by_the_worker_with_the_same_result(tmp_path, photo, encoded, mode):
    for i in range(8):
        folder = tmp_path / "train" / "abc"[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(encoded(photo(i, 300, 360)))
    source = open_source(tmp_path)
    images = []
    for place in ("worker", "device"):
        transform = TrainTransform(32, CropOptions(crop=mode), 0, place)
        images.append(
            next(Loader(source, Sampler(8, 8), transform, options=LoaderOptions(2)).epoch(0)).images.int()
        )
    assert (images[0] - images[1]).abs().max() <= 2


def test_evaluation_sees_everything_once_and_marks_what_it_cannot_read(photo_folder):
    (photo_folder / "val/bee/004.jpg").write_bytes(b"")
    source = open_source(photo_folder, "val")
    sampler = Sampler(len(source), 4, order="sequential")
    loader = Loader(
        source,
        sampler,
        EvalTransform(32),
        Augment(AugmentOptions(), train=False),
        LoaderOptions(2, max_bad=0.1),
    )
    batches = list(loader.epoch(0))
    labels, ids = torch.cat([b.labels for b in batches]), torch.cat([b.ids for b in batches])
    assert ids.tolist() == list(range(13))
    assert [len(b) for b in batches] == [4, 4, 4, 1]
    bad = [i for i in range(13) if source.where(i) == "val/bee/004.jpg"]
    assert labels.eq(-1).nonzero().flatten().tolist() == bad
    assert loader.stats.bad == {"val/bee/004.jpg": "the file is empty"}


def damage(folder):
    """Six broken files of different kinds."""
    names = [f"train/{('ape', 'bee', 'cat')[i % 3]}/{i:03d}.jpg" for i in range(6)]
    good = (folder / names[0]).read_bytes()
    (folder / names[0]).write_bytes(b"")
    (folder / names[1]).write_bytes(good[: len(good) // 3])
    (folder / names[2]).write_bytes(good[:50])
    (folder / names[3]).write_bytes(b"not an image at all")
    at = good.index(b"\xff\xc0") + 5
    (folder / names[4]).write_bytes(good[:at] + b"\xfd\xe8\xfd\xe8" + good[at + 4 :])
    noisy = bytearray(good)
    noisy[len(good) // 2 : len(good) // 2 + 30] = bytes(30)
    (folder / names[5]).write_bytes(bytes(noisy))
    return names


def test_bad_images_are_named_and_replaced_the_same_way_every_time(photo_folder):
    names = damage(photo_folder)
    source = open_source(photo_folder)
    first, again = train_loader(source, 1), train_loader(source, 4)
    one, other = list(first.epoch(0)), list(again.epoch(0))
    assert same_batches(one, other)
    # Crop decode stops at the end of the crop, so a file cut off below it may still be good for one epoch.
    assert {names[0], names[2], names[3], names[4]} <= set(first.stats.bad) <= set(names)
    assert first.stats.bad == again.stats.bad
    assert first.stats.replaced >= 4
    assert all(batch.labels.min() >= 0 for batch in one)


def test_too_many_bad_images_stop_the_run_and_are_named(photo_folder):
    damage(photo_folder)
    source = open_source(photo_folder)
    loader = train_loader(source)
    loader._allowed_bad = 2
    with pytest.raises(
        DataError, match=r"3 bad images are more than the 2 allowed: .*\.jpg .*fathoms data check"
    ):
        list(loader.epoch(0))


class SlowFolder(FolderSource):
    """A folder with one file that hangs when it is read, the first time or every time."""

    def __init__(self, root, hangs):
        super().__init__(root)
        self.stuck, self.hangs, self.release = 7, hangs, threading.Event()

    def read(self, index: int) -> bytes:
        if index == self.stuck and self.hangs > 0:
            self.hangs -= 1
            while not self.release.wait(0.01):
                pass
        return super().read(index)


@pytest.fixture
def slow_folder(photo_folder):
    made = []

    def make(hangs):
        made.append(SlowFolder(photo_folder, hangs))
        return made[-1]

    yield make
    # An abandoned worker must not outlive its test.
    for source in made:
        source.release.set()


@pytest.mark.clock
def test_a_worker_that_hangs_is_replaced_and_the_batches_stay_the_same(photo_folder, slow_folder):
    source, began = slow_folder(hangs=1), time.monotonic()
    loader = train_loader(source, timeout=1.0)
    with pytest.warns(RuntimeWarning, match=rf"data-worker-\d has hung for .* at {source.where(7)}; another"):
        batches = list(loader.epoch(0))
    assert time.monotonic() - began < 10
    assert len(loader.stats.accidents) == 1
    assert same_batches(batches, train_loader(open_source(photo_folder)).epoch(0))


@pytest.mark.clock
def test_a_file_that_hangs_again_stops_the_run_and_is_named_within_seconds(slow_folder):
    source, began = slow_folder(hangs=99), time.monotonic()
    with (
        pytest.warns(RuntimeWarning, match="another worker takes its place"),
        pytest.raises(
            LoaderError,
            match=rf"data-worker-\d has hung for .* at {source.where(7)}, and a worker was replaced",
        ),
    ):
        list(train_loader(source, timeout=1.0).epoch(0))
    assert time.monotonic() - began < 10


def kill_thread(thread):
    """End a thread from outside, as nothing in Python normally does."""
    number = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    assert number == 1


@pytest.fixture
def killer():
    """Kill worker 0 each time it waits at the slow file, `times` times."""
    started = []

    def start(source, times):
        def run():
            left = source.hangs
            for _ in range(times):
                left -= 1
                while source.hangs > left:
                    time.sleep(0.01)
                kill_thread(next(t for t in threading.enumerate() if t.name == "data-worker-0"))
                time.sleep(0.5)

        started.append(threading.Thread(target=run))
        started[-1].start()

    yield start
    for thread in started:
        thread.join()


# Killing a thread is the point; pytest would report it as an accident.
@pytest.mark.clock
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_is_killed_is_replaced_and_the_batches_stay_the_same(photo_folder, slow_folder, killer):
    source, began = slow_folder(hangs=1), time.monotonic()
    killer(source, times=1)
    with pytest.warns(RuntimeWarning, match=rf"data-worker-0 died at {source.where(7)}; another worker"):
        batches = list(train_loader(source, workers=1).epoch(0))
    assert time.monotonic() - began < 10
    assert same_batches(batches, train_loader(open_source(photo_folder)).epoch(0))


# Killing a thread is the point; pytest would report it as an accident.
@pytest.mark.clock
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_second_death_stops_the_run_and_is_named_within_seconds(slow_folder, killer):
    source, began = slow_folder(hangs=99), time.monotonic()
    killer(source, times=2)
    with (
        pytest.warns(RuntimeWarning, match="another worker takes its place"),
        pytest.raises(LoaderError, match=rf"data-worker-0 died at {source.where(7)}, and a worker"),
    ):
        list(train_loader(source, workers=1).epoch(0))
    assert time.monotonic() - began < 10


@pytest.mark.clock
def test_threads_end_with_the_epoch_and_torch_keeps_its_own(photo_folder):
    before = torch.get_num_threads()
    epochs = train_loader(open_source(photo_folder), workers=4).epoch(0)
    next(epochs)
    assert sum(t.name.startswith("data-worker") for t in threading.enumerate()) >= 4
    epochs.close()
    time.sleep(0.1)
    assert not any(t.name.startswith("data-worker") and t.is_alive() for t in threading.enumerate())
    assert torch.get_num_threads() == before


class Work:
    """An event for the work queued on a GPU: under way, or done."""

    def __init__(self, under_way):
        self.under_way = under_way

    def query(self):
        return not self.under_way


@pytest.mark.clock
@pytest.mark.parametrize("under_way", [True, False])
def test_waiting_counts_only_while_the_device_has_nothing_to_do(photo_folder, monkeypatch, under_way):
    loader = train_loader(open_source(photo_folder), workers=1)
    read = type(loader.source).read
    monkeypatch.setattr(
        type(loader.source), "read", lambda source, index: time.sleep(0.01) or read(source, index)
    )
    monkeypatch.setattr(loader._sender, "queued", lambda: Work(under_way))
    assert len(list(loader.epoch(0))) == 6
    # 48 files of 0.01 s each, by one worker.
    assert loader.stats.waited < 0.1 if under_way else loader.stats.waited > 0.3


def test_small_batches_make_small_tasks_so_that_every_worker_has_one(photo_folder, monkeypatch):
    sizes, decode = [], TaskRunner.__call__
    monkeypatch.setattr(
        TaskRunner,
        "__call__",
        lambda self, task, *rest: sizes.append(len(task.refs)) or decode(self, task, *rest),
    )
    for workers, expected in ((1, [8] * 6), (6, [4] * 12)):
        sizes.clear()
        assert len(list(train_loader(open_source(photo_folder), workers=workers).epoch(0))) == 6
        assert sizes == expected


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_workers_do_not_interrupt_the_training_loop(photo_folder, monkeypatch):
    source, seen = open_source(photo_folder), set()
    read = type(source).read
    monkeypatch.setattr(
        type(source), "read", lambda own, i: seen.add(os.sched_getscheduler(0)) or read(own, i)
    )
    next(train_loader(source).epoch(0))
    assert seen == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) != os.SCHED_BATCH


@pytest.mark.clock
def test_waiting_is_measured_and_comes_with_advice(photo_folder):
    loader = train_loader(open_source(photo_folder), workers=1)
    for _ in loader.epoch(0):
        pass
    assert 0 < loader.stats.wait_share <= 1
    loader.stats.waited, loader.stats.elapsed = 4.0, 10.0
    assert loader.advice().startswith("40% of the time is spent waiting for data; ")
    fast = train_loader(open_source(photo_folder), workers=2)
    for _ in fast.epoch(0):
        time.sleep(0.05)
    assert fast.stats.wait_share < 0.7
    fast.stats.waited = 0.0
    assert fast.advice() == ""


def test_packing_is_advised_only_where_waiting_is_worth_it():
    assert LoaderStats().wait_share == LoaderStats().images_per_second == 0.0
    stats = LoaderStats(images=8, waited=0.24, elapsed=4.0)
    assert (stats.wait_share, stats.images_per_second) == (0.06, 2.0)
    assert stats.advice("turbojpeg", "folder", workers=2, cores=2) == ""
    assert "--workers 4" in stats.advice("turbojpeg", "folder", workers=2, cores=4)
    stats.waited = 0.8  # From a fifth on.
    assert "fathoms data pack" in stats.advice("turbojpeg", "folder", workers=2, cores=2)


def test_without_augmentation_bytes_come_out(photo_folder):
    source = open_source(photo_folder)
    transform = TrainTransform(32, CropOptions(crop="pad", hflip=0.0), 0)
    batch = next(Loader(source, Sampler(48, 8), transform, options=LoaderOptions(2)).epoch(0))
    assert batch.images.dtype == torch.uint8
    assert batch.targets is None
    assert np.array_equal(batch.labels.numpy(), source.labels[batch.ids.numpy()])


def test_a_failed_file_is_named_although_the_worker_has_moved_on(photo_folder, monkeypatch):
    source, done = open_source(photo_folder), threading.Event()
    first, read = int(Sampler(len(source), 8).batch(0, 0).index[0]), type(source).read
    loader = train_loader(source, workers=1)

    def fail(own, index):
        if index == first:
            raise ValueError("bad")
        if index not in Sampler(len(source), 8).batch(0, 0).index:
            done.set()
        return read(own, index)

    monkeypatch.setattr(type(source), "read", fail)
    wait = loader._sender.queued
    monkeypatch.setattr(loader._sender, "queued", lambda: done.wait(5) and wait())
    match = rf"data-worker-0 at {source.where(first)} failed with ValueError: bad"
    with pytest.raises(LoaderError, match=match):
        next(loader.epoch(0))
    assert done.is_set()
