"""GPU parts of `benchmarks/loader.py`: a data set on the device, and training fed from packed shards.

Each part prints its progress and stops when its time is over, so that a borrowed machine is never held for long.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from fathoms import ViT, ViTConfig
from fathoms.bench import Setting, training_update
from fathoms.data import (
    ArraySource,
    Augment,
    AugmentOptions,
    Batch,
    CropOptions,
    DeviceLoader,
    Loader,
    LoaderOptions,
    MixOptions,
    Sampler,
    Source,
    TrainTransform,
    choose_backend,
    choose_decoder,
    list_splits,
    open_source,
)
from fathoms.data.packing import PackOptions, pack_split, write_index
from fathoms.data.sources.tar_files import read_index
from fathoms.machine import usable_cores
from fathoms.training.compiling import WARMUP

SIZE = 224
POLICY = "rand-m9-mstd0.5-inc1"
_STARTED = time.perf_counter()


def say(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {text}", flush=True)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_sheets(path: str) -> ArraySource:
    """CIFAR's training images from a file of sheets of 50x50 tiles, with labels in a file of their own."""
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


# How steps are run, by name: as `--amp` alone does, with compiled blocks, and as `docs/speed.md` advises.
SETTINGS = {
    "launched": Setting("autocast", "none", "eager"),
    "compiled": Setting("autocast", "blocks", "eager"),
    "graph": Setting("bf16", "blocks", "graph"),
}


class OneAhead:
    """Wait for the work of the call before: the host is one call ahead of the device and no more.

    As in the loop of `fathoms train`, which reads the result of an update while the next one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []

    def __call__(self, _batch: Batch) -> None:
        """Wait."""
        if self.events:
            self.events[0].record()
            self.events.reverse()
            self.events[0].synchronize()


class Trainer:
    """The updates of `fathoms train` on a ViT, as a consumer of batches; the host is one update ahead and no more."""

    def __init__(self, config: ViTConfig, device: torch.device, setting: Setting) -> None:
        torch.manual_seed(0)
        self.update = training_update(ViT(config).to(device), setting, device, config.in_channels)

    def __call__(self, batch: Batch) -> None:
        """Forward, backward and update."""
        self.update(batch)


def rate(batches: Iterable[Batch], use: Callable[[Batch], None], device: torch.device) -> float:
    """Images per second of `use` on each batch, to the end of the last."""
    synchronise(device)
    began, count = time.perf_counter(), 0
    for batch in batches:
        use(batch)
        count += len(batch)
    synchronise(device)
    return count / (time.perf_counter() - began)


def measure_resident(args: argparse.Namespace) -> dict[str, object]:
    """Images per second of augmentation and batching for CIFAR-10 on the device, and their share of a step.

    The share is what training loses: one minus the rate with the loader over the rate with one batch
    repeated, whole epochs of each in turns. The model is the one of the `cifar` recipe.
    """
    device, size = torch.device(args.device), args.batch_size or 512
    say(f"reading {args.data}")
    source = read_sheets(args.data)
    mix = MixOptions(mixup=0.8, cutmix=1.0)
    pad = CropOptions(crop="pad", train_interpolation="bilinear")
    recipes = {
        "shift_flip": (pad, AugmentOptions()),
        "shift_flip_mix": (pad, AugmentOptions(mix=mix)),
        "randaugment_erase_mix": (pad, AugmentOptions(aa=POLICY, reprob=0.25, mix=mix)),
        "resized_randaugment_erase_mix": (CropOptions(), AugmentOptions(aa=POLICY, reprob=0.25, mix=mix)),
    }
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        dim=384,
        depth=6,
        heads=6,
        num_classes=len(source.classes),
        residual="layerscale",
        readout="mean",
    )
    step = Trainer(config, device, SETTINGS[args.step])
    alone: dict[str, int] = {}
    share: dict[str, float] = {}
    still: list[float] = []
    for name, (crop, options) in recipes.items():
        augment = Augment(
            options, classes=len(source.classes), device=device, backend=choose_backend(args.kernels, device)
        )
        loader = DeviceLoader(source, Sampler(len(source), size), 32, crop, augment, device)
        epochs = itertools.count()
        first = next(loader.epoch(next(epochs)))
        say(f"{name}: the first batch is there")
        # The first turn compiles, captures and fills caches.
        turns = [rate(loader.epoch(next(epochs)), lambda _: None, device) for _ in range(1 + args.turns)]
        alone[name] = round(statistics.median(turns[1:]))
        say(f"{name}: {alone[name]:,} images/s, augmentation and batching alone")
        for _ in range(2 * WARMUP):
            step(first)
        pairs = [
            (
                rate(itertools.repeat(first, loader.batches), step, device),
                rate(loader.epoch(next(epochs)), step, device),
            )
            for _ in range(args.turns)
        ]
        own, fed = (statistics.median(column) for column in zip(*pairs, strict=True))
        still.append(own)
        share[name] = round(1 - fed / own, 4)
        say(f"{name}: training {fed:,.0f} images/s, one batch repeated {own:,.0f}: {share[name]:.1%}")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "batch_size": size,
        "step": args.step,
        "images_per_second": alone,
        "training_images_per_second": round(statistics.median(still)),
        "share_of_step": share,
    }


class Repeated:
    """A source whose files stand in it many times, so that a small set fills long epochs."""

    def __init__(self, source: Source, times: int) -> None:
        self.source, self.times = source, times
        self.kind, self.split, self.classes = source.kind, source.split, source.classes
        self.labels = np.tile(source.labels, times)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Bytes of one image."""
        return self.source.read(index % len(self.source))

    def where(self, index: int) -> str:
        """Its name."""
        return self.source.where(index % len(self.source))

    def size(self, index: int) -> int:
        """Its length in bytes."""
        return self.source.size(index % len(self.source))

    def fingerprint(self) -> str:
        """As the source's."""
        return self.source.fingerprint()


def feed(
    loader: Loader, step: Callable[[Batch], None], seconds: float, still: float
) -> dict[str, float | str]:
    """Train for `seconds` after a warm-up of two; the rate, and the share of time spent waiting.

    `still` is the rate of one batch repeated. A loop that the workers slow down, for the GIL or
    for the cores, does not wait and yet is slow: `fed_share` is what it keeps of its rate.
    """
    began, warm = time.perf_counter(), False
    for batch in loader.epoch(0):
        step(batch)
        spent = time.perf_counter() - began
        if not warm and spent > 2:
            warm, began = True, time.perf_counter()
            loader.stats.waited = loader.stats.elapsed = 0.0
            loader.stats.images = 0
        elif warm and spent > seconds:
            break
    return {
        "images_per_second": round(loader.stats.images_per_second, 1),
        "fed_share": round(loader.stats.images_per_second / still, 4),
        "wait_share": round(loader.stats.wait_share, 4),
        "advice": loader.advice(),
    }


def measure_feed(args: argparse.Namespace) -> dict[str, object]:
    """The share of its training rate that a 36-block, 192-wide ViT keeps when it is fed from packed shards."""
    device = torch.device(args.device)
    decoder = choose_decoder()
    cores = usable_cores()
    say(f"decoder in use: {decoder.name} ({decoder.reason}); {cores} cores")
    split = list_splits(args.data)[0]
    original = open_source(args.data, split)
    with tempfile.TemporaryDirectory() as folder:
        entry, _ = pack_split(original, Path(folder), PackOptions(), workers=cores)
        write_index(Path(folder), original.classes, {original.split: entry}, PackOptions())
        pack = open_source(folder, split)
        say(f"packed {len(pack)} images")
        size = args.batch_size or 256
        source = Repeated(pack, -(-size * 4000 // len(pack)))
        options = AugmentOptions(aa=POLICY, reprob=0.25, mix=MixOptions(mixup=0.8, cutmix=1.0))
        augment = Augment(
            options, classes=len(source.classes), device=device, backend=choose_backend(args.kernels, device)
        )
        config = ViTConfig(
            image_size=SIZE, dim=192, depth=args.depth, heads=3, num_classes=len(source.classes)
        )
        step = Trainer(config, device, SETTINGS[args.step])
        transform = TrainTransform(SIZE, CropOptions(), 0, "device" if device.type == "cuda" else "worker")

        def loader(workers: int) -> Loader:
            sampler = Sampler(len(source), size)
            return Loader(
                source, sampler, transform, augment, LoaderOptions(workers, args.worker_kind), device
            )

        first = loader(cores)
        for number, batch in enumerate(first.epoch(0)):
            step(batch)
            synchronise(device)
            say(f"step {number} of the warm-up")
            if number == 2 * WARMUP:
                break
        first.close()
        once = rate(itertools.repeat(batch, 10), step, device)
        count = max(1, int(args.seconds * once / size))
        still = rate(itertools.repeat(batch, count), step, device)
        say(f"one batch repeated: {still:,.0f} images/s")
        found = {}
        for workers in args.workers or [cores]:
            own = loader(workers)
            idle = feed(own, OneAhead(device), args.seconds / 2, still)
            found[str(workers)] = feed(own, step, args.seconds, still)
            found[str(workers)]["alone_images_per_second"] = idle["images_per_second"]
            say(f"{workers} {own.worker_kind}: {found[str(workers)]}")
            own.close()
    best = max(found.values(), key=lambda result: float(result["fed_share"]))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "decoder": decoder.name,
        "cores": cores,
        "batch_size": size,
        "depth": args.depth,
        "step": args.step,
        "worker_kind": own.worker_kind,
        "still_images_per_second": round(still, 1),
        "by_workers": found,
        "fed_share": best["fed_share"],
        "wait_share": best["wait_share"],
        "images_per_second": best["images_per_second"],
    }
