"""Time the input pipeline against timm's: CPU work per image on one core, ratios from one run.

    python benchmarks/loader.py ../shared/data/pet_photos_original.tar --json
    python benchmarks/loader.py --device-resident ../shared/data/cifar10_sheets.tar --device cuda --json
    python benchmarks/loader.py --feed ../shared/data/pet_photos_original.tar --device cuda --json

The first form trains nothing: it measures RandomResizedCrop(224) + flip + RandAugment, one core, the
files in memory, with timm's pipeline and with ours, in turns, and compares medians:

* cpu: everything on the CPU (decode, resize, RandAugment);
* split: decode only, resize and RandAugment left to the GPU;
* packed: the same from files re-encoded once (`fathoms data pack`, longest side 500, quality 90).

Each is measured with crop decode (libturbojpeg 3) and with simplejpeg alone. The second form keeps
CIFAR-10 on the device and measures augmentation and batching there, and as a share of a training
step. The third trains a 36-block, 192-wide ViT from packed shards on all cores and measures how long
it waits for data.
"""

from __future__ import annotations

import argparse
import io
import json
import os
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
    ArraySource,
    Augment,
    AugmentOptions,
    CropOptions,
    Loader,
    LoaderOptions,
    MixOptions,
    Plan,
    ResidentLoader,
    Source,
    TrainView,
    choose_decoder,
    list_splits,
    open_source,
)
from fathoms.data.pack import PackOptions, pack_split, write_index
from fathoms.data.plan import Refs
from fathoms.data.sources.tar_index import read_index
from fathoms.data.views import Reader

SIZE = 224
POLICY = "rand-m9-mstd0.5-inc1"
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
    """What one of our workers does with a chunk of samples."""
    source = _Memory(files)
    reader = Reader(
        source, choose_decoder(backend), lambda _: None, lambda name, why: sys.exit(f"{name}: {why}")
    )
    view = TrainView(SIZE, CropOptions(interpolation=interpolation), 0, resize_on)
    work = Augment(AugmentOptions(aa=POLICY, interpolation=interpolation)) if augment else None

    def chunk(refs: Refs, epoch: int) -> None:
        out = view.prepare(reader, refs, epoch, pin=False)
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
    files = [source.read(i) for source in sources for i in range(len(source))][: args.images]
    packed = repacked(sources)[: args.images]
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
        "split_ratio": middle["split_simplejpeg"] / middle["timm"],
        "packed_ratio": middle["packed_simplejpeg"] / middle["timm"],
        "decoder": crop.name,
    }
    if best == "crop":
        result["split_ratio_crop"] = middle["split_crop"] / middle["timm"]
        result["packed_ratio_crop"] = middle["packed_crop"] / middle["timm"]
    return result


def read_sheets(path: str) -> ArraySource:
    """CIFAR's training images from the sheet file of ../shared/data (see its README)."""
    from PIL import Image

    members = {member.name: member for member in read_index(path)}
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = {
            name: os.pread(descriptor, m.size, m.offset) for name, m in members.items() if "test" not in name
        }
    finally:
        os.close(descriptor)
    meta = json.loads(data["meta.json"])
    grid, tile = meta["grid"], meta["tile"]
    parts = []
    for name in sorted(data):
        if name.startswith("train_"):
            sheet = np.asarray(Image.open(io.BytesIO(data[name])).convert("RGB"))
            tiles = sheet.reshape(grid, tile, grid, tile, 3).transpose(0, 2, 1, 3, 4)
            parts.append(tiles.reshape(-1, tile, tile, 3))
    labels = np.frombuffer(data["labels_train.bin"], np.uint8)
    return ArraySource("sheets", "train", np.concatenate(parts)[: len(labels)], labels, meta["classes"])


def measure_resident(args: argparse.Namespace) -> dict[str, object]:
    """Images per second of augmentation and batching for CIFAR-10 kept on the device."""
    source = read_sheets(args.data)
    device = torch.device(args.device)
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    mix = MixOptions(mixup=0.8, cutmix=1.0)
    recipes = {
        "shift_flip": (CropOptions(mode="pad", interpolation="bilinear"), AugmentOptions()),
        "shift_flip_mix": (CropOptions(mode="pad", interpolation="bilinear"), AugmentOptions(mix=mix)),
        "resized_randaugment_erase_mix": (CropOptions(), AugmentOptions(aa=POLICY, reprob=0.25, mix=mix)),
    }
    rates, milliseconds = {}, {}
    for name, (crop, options) in recipes.items():
        augment = Augment(options, classes=len(source.classes), device=device, compile=args.compile)
        loader = ResidentLoader(source, Plan(len(source), args.batch_size), 32, crop, augment, device)
        turns = []
        for turn in range(args.repeats + 1):
            sync()
            began, count = time.perf_counter(), 0
            for batch in loader.epoch(turn):
                count += len(batch)
                if count >= args.images:
                    break
            sync()
            turns.append(count / (time.perf_counter() - began))
        rates[name] = round(statistics.median(turns[1:]))
        milliseconds[name] = round(1e3 * args.batch_size / rates[name], 3)
    step = Trainer(image_size=32, patch_size=4, depth=12, classes=len(source.classes), device=device)
    batch = loader.batch(0, 0)
    times = []
    for _ in range(4):
        sync()
        began = time.perf_counter()
        step(batch.images, batch.labels)
        sync()
        times.append(time.perf_counter() - began)
    base = 1e3 * statistics.median(times[1:])
    return {
        "device": str(device),
        "batch_size": args.batch_size,
        "images_per_second": rates,
        "milliseconds_per_batch": milliseconds,
        "step_milliseconds": round(base, 3),
        "share_of_step": {name: round(value / (value + base), 4) for name, value in milliseconds.items()},
    }


class Trainer:
    """One training step of a 192-wide ViT, as a consumer of batches; bfloat16 on a GPU."""

    def __init__(
        self, image_size: int, patch_size: int, depth: int, classes: int, device: torch.device
    ) -> None:
        from fathoms import ViT, ViTConfig

        torch.manual_seed(0)
        config = ViTConfig(
            image_size=image_size, patch_size=patch_size, dim=192, depth=depth, heads=3, num_classes=classes
        )
        self.device = device
        self.model = ViT(config).to(device)
        if device.type == "cuda":
            self.model = torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Forward, backward and update."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = torch.nn.functional.cross_entropy(self.model(images).float(), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Repeated:
    """A source whose files stand in it many times, so that a small set fills long epochs."""

    def __init__(self, source: Source, times: int) -> None:
        self.source, self.times = source, times
        self.kind, self.split, self.classes = source.kind, source.split, source.classes
        self.labels = np.tile(source.labels, times)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        return self.source.read(index % len(self.source))

    def where(self, index: int) -> str:
        return self.source.where(index % len(self.source))

    def size(self, index: int) -> int:
        return self.source.size(index % len(self.source))

    def fingerprint(self) -> str:
        return self.source.fingerprint()


def measure_feed(args: argparse.Namespace) -> dict[str, object]:
    """Share of the time that training waits for data, from packed shards on all cores."""
    device = torch.device(args.device)
    original = open_source(args.data)
    with tempfile.TemporaryDirectory() as folder:
        entry, _ = pack_split(original, Path(folder), PackOptions(), workers=os.cpu_count() or 1)
        write_index(Path(folder), original.classes, {original.split: entry}, PackOptions())
        pack = open_source(folder)
        batch_size = min(args.batch_size, 256)
        source = _Repeated(pack, -(-batch_size * (args.steps + 20) // len(pack)))
        options = AugmentOptions(aa=POLICY, reprob=0.25, mix=MixOptions(mixup=0.8, cutmix=1.0))
        augment = Augment(options, classes=len(source.classes), device=device, compile=args.compile)
        view = TrainView(SIZE, CropOptions(), 0, "device" if device.type == "cuda" else "worker")
        settings = LoaderOptions(workers=args.workers)
        loader = Loader(source, Plan(len(source), batch_size), view, augment, settings, device)
        step = Trainer(SIZE, 16, args.depth, len(source.classes), device)
        warm_up = 15 if device.type == "cuda" else 1
        for number, batch in enumerate(loader.epoch(0)):
            step(batch.images, batch.labels)
            if number == warm_up:
                # Compilation and the first batches are over: count from here.
                loader.stats.waited = loader.stats.elapsed = 0.0
                loader.stats.images = 0
            if number == warm_up + args.steps:
                break
            if device.type == "cuda":
                # As a training loop that reads its loss: without it the host runs ahead of the device.
                torch.cuda.synchronize()
    return {
        "device": str(device),
        "workers": settings.threads,
        "decoder": loader.decoder.name,
        "batch_size": batch_size,
        "images_per_second": round(loader.stats.images_per_second, 1),
        "wait_share": round(loader.stats.wait_share, 4),
        "advice": loader.advice(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a tar or folder of photos; with --device-resident, cifar10_sheets.tar")
    parser.add_argument("--device-resident", action="store_true")
    parser.add_argument("--feed", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", choices=("none", "inductor"), default="none")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--images", type=int, default=50_000, help="at most this many images a turn")
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
