"""Input pipeline against timm's: CPU time per image on one core, ratios from one run.

    python benchmarks/loader.py pet_photos_original.tar --json
    python benchmarks/loader.py --device-resident cifar10_sheets.tar --device cuda --json
    python benchmarks/loader.py --feed pet_photos_original.tar --device cuda --json

The first command trains nothing: it measures RandomResizedCrop(224) + flip + RandAugment, one core, the
files in memory, with timm's pipeline and with ours, in turns, and compares medians:

* cpu: everything on the CPU (decode, resize, RandAugment);
* split: decode only, resize and RandAugment left to the GPU;
* packed: the same from files re-encoded once (`fathoms data pack`, longest side 500, quality 90).

Each is measured with crop decode (libturbojpeg 3) and with simplejpeg alone. The second command keeps
CIFAR-10 on the device and measures augmentation and batching there, and as a share of a training
step. The third trains a 36-block, 192-wide ViT from packed shards on all cores and measures `fed_share`, its rate
over that of one batch repeated, and how long it waits for data.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fathoms.data import (
    Augment,
    AugmentOptions,
    CropOptions,
    Source,
    TrainTransform,
    choose_decoder,
    list_splits,
    open_source,
)
from fathoms.data.decode.sample_reader import SampleReader
from fathoms.data.device.backend import IMPLS
from fathoms.data.loader import WORKER_KINDS
from fathoms.data.sampler import Refs
from fathoms.data.tools.pack import PackOptions, pack_split, write_index
from fathoms.data.workers.shared_memory import own_memory
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a tar or folder of images; with --device-resident, cifar10_sheets.tar")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--device-resident", action="store_true", help="the second command above")
    form.add_argument("--feed", action="store_true", help="the third command above")
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
    result = measure_feed(args) if args.feed else measure(args)
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
