"""The GIL: how much it slows a training loop that shares its process with the data workers.

    python benchmarks/gil.py pet_photos_original.tar --json

The main thread runs small torch operations, each of which releases the GIL and takes it again, as
the launch of a kernel does. Meanwhile workers prepare packed images for a GPU (crop decode, nothing else) as
fast as they can: first in another process, where they share the cores and the memory with the loop but not the
GIL, then in the same process, in turns. `share` is the ratio of the two rates: what the GIL leaves; `delay` is
the time that the loop loses to it for each image, in microseconds, and `held` how long a worker holds it for each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fathoms.data import CropOptions, Sampler, TrainTransform, choose_decoder, list_splits, open_source
from fathoms.data.decode.turbojpeg import load_turbojpeg
from fathoms.data.loader import CHUNK
from fathoms.data.tools.pack import PackOptions, pack_split, write_index
from fathoms.data.workers.shared_memory import own_memory
from fathoms.data.workers.task import Task, TaskRunner
from fathoms.data.workers.threads import ThreadPool, Worker
from fathoms.machine.cores import usable_cores
from gpu_loader import SIZE, Repeated

_TASKS = 4000


def refuse(name: str, reason: str) -> None:
    """Stop: a bad image would be missing from the measurement."""
    raise SystemExit(f"gil: {name}: {reason}")


class Busy:
    """Workers that prepare batches of `folder` at full speed, and a count of what they have done."""

    def __init__(self, folder: str, workers: int, chunk: int) -> None:
        source = Repeated(open_source(folder, "train"), 100)
        sampler, transform = Sampler(len(source), chunk), TrainTransform(SIZE, CropOptions(), 0, "device")
        run = TaskRunner(source, choose_decoder(), None)
        self.done = [0] * 64

        def work(task: Task, worker: Worker) -> None:
            run(task, worker.begin, refuse, own_memory(pin=False))
            self.done[int(worker.name.rsplit("-", 1)[1])] += len(task.refs)

        self.pool = ThreadPool(work, workers, timeout=60.0)
        for number in range(_TASKS):
            self.pool.submit(number, Task(sampler.batch(0, number % sampler.batches), 0, transform))

    def close(self) -> None:
        """Let the workers end."""
        self.pool.close()


def count_images(folder: str, workers: int, chunk: int, pipe: Any) -> None:
    """The same in a process of its own; replies to each message with the number of images so far."""
    torch.set_num_threads(1)
    busy = Busy(folder, workers, chunk)
    while pipe.recv() == "count":
        pipe.send(sum(busy.done))
    busy.close()


def launches(seconds: float) -> float:
    """Small operations per second of this thread."""
    x = torch.zeros(8)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(200):
            x.add_(1)
        count += 200
    return count / (time.perf_counter() - began)


def held(folder: str, chunk: int, turns: int) -> float:
    """Processor time for one image outside reading and decoding, which release the GIL; in microseconds.

    The lower quartile over tasks, in one thread: what else the machine does makes some of them slower.
    """
    library = load_turbojpeg()[0]
    if library is None:
        raise SystemExit("gil: no crop decode here; pip install turbojpeg")
    free = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any) -> Any:
            nonlocal free
            began = time.thread_time()
            result = call(*args)
            free += time.thread_time() - began
            return result

        return timed_call

    source = open_source(folder, "train")
    sampler, transform = Sampler(len(source), chunk), TrainTransform(SIZE, CropOptions(), 0, "device")
    run, worker = TaskRunner(source, choose_decoder(), None), Worker("data-worker-0")
    spent = []
    with (
        mock.patch.object(os, "pread", timed(os.pread)),
        mock.patch.object(library.library, "tj3Decompress8", timed(library.library.tj3Decompress8)),
    ):
        for turn, step in itertools.product(range(turns), range(sampler.batches)):
            refs = sampler.batch(turn, step)
            free, began = 0.0, time.thread_time()
            run(Task(refs, turn, transform), worker.begin, refuse, own_memory(pin=False))
            spent.append(time.thread_time() - began - free)
    return 1e6 * statistics.quantiles(spent)[0] / chunk


def within_process(folder: str, workers: int, chunk: int, seconds: float) -> tuple[float, float]:
    """(operations, images) per second with the workers in this process."""
    busy = Busy(folder, workers, chunk)
    time.sleep(0.1)
    began, before = time.perf_counter(), sum(busy.done)
    rate = launches(seconds)
    images = (sum(busy.done) - before) / (time.perf_counter() - began)
    busy.close()
    return rate, images


class OtherProcess:
    """A process with workers of its own, which stands still except while it is measured."""

    def __init__(self, folder: str, workers: int, chunk: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=count_images, args=(folder, workers, chunk, there), daemon=True)
        self.process.start()
        # Only the other process holds its end now: should it die, this one gets an error instead of waiting.
        there.close()
        self.done()
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """Stop it, or let it continue."""
        os.kill(self.process.pid or 0, number)

    def done(self) -> int:
        """Images so far."""
        self.pipe.send("count")
        return self.pipe.recv()

    def measure(self, seconds: float) -> tuple[float, float]:
        """(operations, images) per second with the workers in the other process."""
        self.signal(signal.SIGCONT)
        time.sleep(0.1)
        before, began = self.done(), time.perf_counter()
        rate = launches(seconds)
        images = (self.done() - before) / (time.perf_counter() - began)
        self.signal(signal.SIGSTOP)
        return rate, images

    def close(self) -> None:
        """End it."""
        self.signal(signal.SIGCONT)
        self.pipe.send("end")
        self.process.join()


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Every number of workers, both ways, in turns; medians."""
    torch.set_num_threads(1)
    original = open_source(args.data, list_splits(args.data)[0])
    result: dict[str, object] = {"chunk": args.chunk, "alone": round(launches(1.0))}
    with tempfile.TemporaryDirectory() as folder:
        entry, _ = pack_split(original, Path(folder), PackOptions(), workers=usable_cores())
        write_index(Path(folder), original.classes, {"train": entry}, PackOptions())
        result["held"] = round(held(folder, args.chunk, turns=10), 1)
        for workers in args.workers:
            with contextlib.closing(OtherProcess(folder, workers, args.chunk)) as other:
                turns = [
                    (*other.measure(args.seconds), *within_process(folder, workers, args.chunk, args.seconds))
                    for _ in range(args.repeats)
                ]
            apart, images_apart, shared, images = (
                statistics.median(column) for column in zip(*turns, strict=True)
            )
            share = statistics.median(turn[2] / turn[0] for turn in turns)
            result[f"{workers} workers"] = {
                "operations_beside": round(apart),
                "operations_within": round(shared),
                "share": round(share, 3),
                "images_beside": round(images_apart),
                "images_within": round(images),
                "delay": round(1e6 * (1 - share) / images, 1),
            }
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a tar or folder of images")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--chunk", type=int, default=CHUNK, help="samples of one task")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    for name, value in result.items():
        print(f"{name:12s} {value}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
