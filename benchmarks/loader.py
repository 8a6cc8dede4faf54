"""Input pipeline against timm's: CPU time per image on one core, ratios from one run.

    python benchmarks/loader.py pet_photos_original.tar --json
    python benchmarks/loader.py --device-resident cifar10_sheets.tar --device cuda --json
    python benchmarks/loader.py --feed pet_photos_original.tar --device cuda --json
    python benchmarks/loader.py --pools pet_photos_original.tar --images 768 --repeats 3 --json

The first command trains nothing: it measures RandomResizedCrop(224) + flip + RandAugment, one core, the
files in memory, with timm's pipeline and with ours, in turns, and compares medians:

* cpu: everything on the CPU (decode, resize, RandAugment);
* split: decode only, resize and RandAugment left to the GPU;
* packed: the same from files re-encoded once (`fathoms data pack`, longest side 500, quality 90).

Each is measured with crop decode (libturbojpeg 3) and with simplejpeg alone. The second command keeps
CIFAR-10 on the device and measures augmentation and batching there, and as a share of a training
step. The third trains a 36-block, 192-wide ViT from packed shards on all cores and measures `fed_share`, its rate
over that of one batch repeated, and how long it waits for data. The fourth compares threads, processes and torch's
DataLoader by images per CPU second.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from fathoms.data import (
    Augment,
    AugmentOptions,
    Batch,
    CropOptions,
    Loader,
    LoaderOptions,
    Sampler,
    Source,
    TrainTransform,
    choose_decoder,
    list_splits,
    open_source,
)
from fathoms.data.augment.pipeline import IMPLS
from fathoms.data.images.crops import SampleReader
from fathoms.data.loader import CHUNK as CHUNK_SIZE
from fathoms.data.loader import WORKER_KINDS
from fathoms.data.packing import PackOptions, pack_split, write_index
from fathoms.data.sampler import Refs
from fathoms.data.sources.splits import SourceSubset
from fathoms.data.workers import Done, Status, Task, TaskRunner, own_memory
from gpu_loader import POLICY, SETTINGS, SIZE, measure_feed, measure_resident

CHUNK = 16


def timm_pipeline(files: list[bytes], interpolation: str) -> Callable[[int], None]:
    """The training transform of timm on one file: open, convert, crop, flip, RandAugment, to uint8."""
    from PIL import Image, ImageOps
    from timm.data import create_transform

    transform = create_transform(
        SIZE, is_training=True, auto_augment=POLICY, interpolation=interpolation, use_prefetcher=True
    )
    # Pillow 13 refuses posterize with 0 bits, which timm draws now and then; black is what it gave before.
    original = ImageOps.posterize
    ImageOps.posterize = lambda image, bits: original(image, bits) if bits else image.point(lambda _: 0)

    def one(number: int) -> None:
        with Image.open(io.BytesIO(files[number])) as image:
            transform(image.convert("RGB"))

    return one


class _Memory:
    """Files already in memory, as a source: the disk is not what is measured."""

    kind, split, classes = "memory", "train", ("all",)

    def __init__(self, files: list[bytes]) -> None:
        self.files, self.labels = files, np.zeros(len(files), np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        return self.files[index]

    def where(self, index: int) -> str:
        return f"file {index}"

    def size(self, index: int) -> int:
        return len(self.files[index])

    def fingerprint(self) -> str:
        return ""


def our_pipeline(
    files: list[bytes], backend: str, resize_on: str, augment: bool, interpolation: str
) -> Callable[[Refs, int], None]:
    """The work of one of our workers on a chunk of samples."""
    source = _Memory(files)
    reader = SampleReader(
        source, choose_decoder(backend), lambda _: None, lambda name, why: sys.exit(f"{name}: {why}")
    )
    transform = TrainTransform(SIZE, CropOptions(train_interpolation=interpolation), 0, resize_on)
    work = Augment(AugmentOptions(aa=POLICY, train_interpolation=interpolation)) if augment else None

    def chunk(refs: Refs, epoch: int) -> None:
        out = transform(reader, refs, epoch, own_memory(pin=False))
        if work is not None and out.images is not None:
            work.colours(out.images, refs, epoch)

    return chunk


def repacked(sources: list[Source]) -> list[bytes]:
    """Every file as `fathoms data pack` stores it, in the order of the sources."""
    files: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        entries = {source.split: pack_split(source, Path(folder), PackOptions())[0] for source in sources}
        write_index(Path(folder), sources[0].classes, entries, PackOptions())
        for source in sources:
            pack = open_source(folder, source.split)
            # A packed sample is named after its place in the source.
            place = {int(pack.where(i).split("!")[1].split(".")[0]): i for i in range(len(pack))}
            files += [pack.read(place[i]) for i in range(len(source))]
    return files


def measure_cpu(args: argparse.Namespace) -> dict[str, object]:
    """Images per second of every path, in turns; medians and ratios to timm."""
    torch.set_num_threads(1)
    sources = [open_source(args.data, split) for split in list_splits(args.data)]
    part = slice(args.first, args.first + args.images)
    files = [source.read(i) for source in sources for i in range(len(source))][part]
    packed = repacked(sources)[part]
    backends = {"simplejpeg": "simplejpeg"}
    crop = choose_decoder("auto")
    if crop.name == "turbojpeg":
        backends["crop"] = "turbojpeg"
    paths: dict[str, tuple[list[bytes], Callable[[Refs, int], None]]] = {}
    layouts = (
        ("cpu", files, "worker", True),
        ("split_worker_resize", files, "worker", False),
        ("split", files, "device", False),
        ("packed_worker_resize", packed, "worker", False),
        ("packed", packed, "device", False),
    )
    for label, backend in backends.items():
        for name, own, resize_on, augment in layouts:
            work = our_pipeline(own, backend, resize_on, augment, args.interpolation)
            paths[f"{name}_{label}"] = (own, work)
    reference = timm_pipeline(files, args.interpolation)
    rates: dict[str, list[float]] = {name: [] for name in ("timm", *paths)}
    random.seed(0)
    np.random.seed(0)
    for turn in range(args.repeats + 1):
        spent = dict.fromkeys(rates, 0.0)
        # Every path does the same small piece before the next one starts: what else the machine does
        # meanwhile, it does to all of them.
        for start in range(0, len(files), CHUNK):
            index = np.arange(start, min(start + CHUNK, len(files)))
            began = time.process_time()
            for number in index:
                reference(int(number))
            spent["timm"] += time.process_time() - began
            for name, (own, work) in paths.items():
                place = index % len(own)
                began = time.process_time()
                work(Refs(place, np.zeros_like(place), place), turn)
                spent[name] += time.process_time() - began
        for name, seconds in spent.items():
            rates[name].append(len(files) / seconds)
    # The first turn warms caches and allocators.
    middle = {name: statistics.median(values[1:]) for name, values in rates.items()}
    best = "crop" if "crop" in backends else "simplejpeg"
    result: dict[str, object] = {
        "images": len(files),
        "repeats": args.repeats,
        "interpolation": args.interpolation,
        "images_per_second": {name: round(value, 1) for name, value in middle.items()},
        "ratios": {name: round(value / middle["timm"], 3) for name, value in middle.items()},
        "cpu_ratio": middle[f"cpu_{best}"] / middle["timm"],
        "cpu_ratio_simplejpeg": middle["cpu_simplejpeg"] / middle["timm"],
        "split_ratio": middle["split_simplejpeg"] / middle["timm"],
        "packed_ratio": middle["packed_simplejpeg"] / middle["timm"],
        "decoder": crop.name,
    }
    if best == "crop":
        result["split_ratio_crop"] = middle["split_crop"] / middle["timm"]
        result["packed_ratio_crop"] = middle["packed_crop"] / middle["timm"]
    return result


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


class _Decoded(torch.utils.data.Dataset):
    """Tasks as torch's DataLoader takes them, decoded straight into memory that processes share."""

    def __init__(self, run: TaskRunner) -> None:
        self.run, self.status = run, Status("torch")

    def __getitem__(self, task: Task) -> Done:
        return self.run(task, self.status, self._shared)

    @staticmethod
    def _shared(shape: Sequence[int]) -> torch.Tensor:
        memory = torch.UntypedStorage._new_shared(math.prod(shape))
        return torch.empty(0, dtype=torch.uint8).set_(memory, 0, tuple(shape))


def through_torch(loader: Loader) -> Iterator[Batch]:
    """An epoch through `torch.utils.data.DataLoader(batch_size=None)`, put together as `Loader` does it."""
    workers, ahead = loader.options.count, loader.options.prefetch
    run = TaskRunner(loader.source, loader.decoder, loader.augment if loader._augment_in_worker else None)
    size = min(CHUNK_SIZE, -(-loader.sampler.batch_size * ahead // workers))
    parts = []
    for number in range(loader.batches):
        refs = loader.sampler.batch(0, number)
        places = range(0, len(refs), size)
        parts.append((refs, [Task(refs.part(at, at + size), 0, loader.transform) for at in places]))
    results = iter(
        torch.utils.data.DataLoader(
            _Decoded(run),
            batch_size=None,
            sampler=[task for _, tasks in parts for task in tasks],
            num_workers=workers,
            prefetch_factor=-(-ahead * len(parts[0][1]) // workers),
            multiprocessing_context="fork",
        )
    )
    for number, (refs, tasks) in enumerate(parts):
        chunks = [next(results).chunk for _ in tasks]
        yield loader._assemble(chunks, refs, 0, number, loader.transform.size)


def measure_pools(args: argparse.Namespace) -> dict[str, object]:
    """Images per CPU second of each pool with two workers, their start included: an epoch in turns, medians."""
    torch.set_num_threads(1)
    source = open_source(args.data, list_splits(args.data)[0])
    rows = np.resize(np.arange(len(source)), args.images)
    source, found = SourceSubset(source, rows, "train"), {}
    for decoder, augmented in itertools.product(("turbojpeg", "simplejpeg"), (True, False)):
        rates: dict[str, list[float]] = {"threads": [], "processes": [], "torch": []}
        for _turn, kind in itertools.product(range(args.repeats), rates):
            options = LoaderOptions(2, "threads" if kind == "torch" else kind, decoder=decoder)
            augment = Augment(AugmentOptions(aa=POLICY), classes=len(source.classes)) if augmented else None
            loader = Loader(
                source, Sampler(len(source), 64), TrainTransform(SIZE, CropOptions(), 0), augment, options
            )
            began = cpu_seconds()
            count = sum(
                len(batch) for batch in (through_torch(loader) if kind == "torch" else loader.epoch(0))
            )
            loader.close()
            rates[kind].append(count / (cpu_seconds() - began))
        middle = {kind: round(statistics.median(values), 1) for kind, values in rates.items()}
        found[f"{decoder}, {'RandAugment' if augmented else 'crops alone'}"] = middle
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a tar or folder of images; with --device-resident, cifar10_sheets.tar")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--device-resident", action="store_true", help="the second command above")
    form.add_argument("--feed", action="store_true", help="the third command above")
    form.add_argument("--pools", action="store_true", help="the fourth command above")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--step", choices=SETTINGS, default="launched", help="how a training step is run")
    parser.add_argument("--kernels", choices=IMPLS, default="auto", help="backend of the work on the device")
    parser.add_argument("--workers", type=int, nargs="*", help="with --feed: numbers of workers to try")
    parser.add_argument(
        "--worker-kind", choices=WORKER_KINDS, default="auto", help="with --feed: kind of decoding workers"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="with --feed: length of one measurement")
    parser.add_argument("--turns", type=int, default=3, help="with --device-resident: epochs of each kind")
    parser.add_argument("--depth", type=int, default=36, help="with --feed: blocks of the ViT")
    parser.add_argument("--batch-size", type=int, help="512 with --device-resident, 256 with --feed")
    parser.add_argument("--first", type=int, default=0, help="start at this image, to measure in pieces")
    parser.add_argument("--images", type=int, default=50_000, help="largest number of images in a turn")
    parser.add_argument("--repeats", type=int, default=5)
    # "random" is the default of timm's training script, for the crop and for the operations.
    parser.add_argument("--interpolation", choices=("random", "bilinear", "bicubic"), default="random")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    measure = measure_resident if args.device_resident else measure_cpu
    measure = measure_feed if args.feed else measure_pools if args.pools else measure
    result = measure(args)
    for name, value in result.items():
        if isinstance(value, dict):
            for key, number in value.items():
                print(f"{name:20s} {key:36s} {number}")
        else:
            print(f"{name:20s} {value}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
