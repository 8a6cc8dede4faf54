"""Evaluation pixels: one fixed network on timm's evaluation transform and on ours.

    python benchmarks/eval_pixels.py clothing_photos.tar --json

Trains a small ViT for a few minutes on the training split (our loader, one core), then classifies every
image of the other splits twice: read by Pillow with timm's evaluation transform, and read by our
evaluation loader. Reports both accuracies, how many predictions agree, and the difference of the pixels,
the latter also at 224 pixels for 64 images of each split.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import time

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from fathoms import ViT, ViTConfig
from fathoms.data import (
    IMAGENET_STD,
    Augment,
    AugmentOptions,
    CropOptions,
    EvalTransform,
    Loader,
    LoaderOptions,
    Sampler,
    Source,
    TrainTransform,
    list_splits,
    open_source,
)


def train(source: Source, size: int, minutes: float) -> ViT:
    """A ViT of four blocks, trained until the time is over; one cycle of the learning rate."""
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(
            image_size=size,
            patch_size=size // 8,
            dim=192,
            depth=4,
            heads=6,
            num_classes=len(source.classes),
            readout="mean",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    transform = TrainTransform(size, CropOptions(scale=(0.4, 1.0)), seed=0)
    augment = Augment(AugmentOptions(), classes=len(source.classes))
    loader = Loader(source, Sampler(len(source), 32), transform, augment, LoaderOptions(workers=1))
    began, epoch = time.process_time(), 0
    while True:
        for batch in loader.epoch(epoch):
            done = (time.process_time() - began) / (60 * minutes)
            if done >= 1:
                return model.eval()
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, 20 * done) * (1 - done)
            loss = torch.nn.functional.cross_entropy(model(batch.images), batch.labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        epoch += 1
        print(f"epoch {epoch}: loss {loss.item():.3f}, {done:.0%} of the time", flush=True)


def by_timm(source: Source, size: int, count: int) -> Tensor:
    """The first `count` images as timm's evaluation gives them: Pillow, resize, centre crop, normalise."""
    transform = create_transform(size, crop_pct=0.875, interpolation="bicubic")
    images = []
    for i in range(count):
        with Image.open(io.BytesIO(source.read(i))) as image:
            images.append(transform(image.convert("RGB")))
    return torch.stack(images)


def by_us(source: Source, size: int, count: int) -> Tensor:
    """The first `count` images as our evaluation gives them. EXIF is left alone, as timm leaves it."""
    sampler = Sampler(len(source), 64, order="sequential")
    augment = Augment(AugmentOptions(), train=False)
    options = LoaderOptions(workers=1, exif="ignore")
    loader = Loader(source, sampler, EvalTransform(size, 0.875, "bicubic"), augment, options)
    batches = itertools.islice(loader.epoch(0), -(-count // 64))
    return torch.cat([batch.images for batch in batches])[:count]


def levels(ours: Tensor, theirs: Tensor) -> np.ndarray:
    """Differences of the pixels on the scale 0 to 255."""
    scale = 255 * torch.tensor(IMAGENET_STD)[:, None, None]
    return ((ours - theirs).abs() * scale).numpy()


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--minutes", type=float, default=5.0, help="processor time of the training")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = train(open_source(args.data, "train"), args.size, args.minutes)
    right = {"timm": 0, "ours": 0}
    count = same = 0
    pixel: dict[int, list[float]] = {args.size: [], 224: []}
    largest = 0.0
    for split in list_splits(args.data):
        if split == "train":
            continue
        source = open_source(args.data, split)
        labels = torch.from_numpy(np.asarray(source.labels))
        theirs, ours = by_timm(source, args.size, len(source)), by_us(source, args.size, len(source))
        with torch.inference_mode():
            guess = [torch.cat([model(part).argmax(1) for part in x.split(64)]) for x in (theirs, ours)]
        right["timm"] += int((guess[0] == labels).sum())
        right["ours"] += int((guess[1] == labels).sum())
        same += int((guess[0] == guess[1]).sum())
        count += len(labels)
        found = levels(ours, theirs)
        pixel[args.size].append(float(found.mean()))
        largest = max(largest, float(found.max()))
        # As many again at the usual size would fill the memory of a small machine.
        pixel[224].append(float(levels(by_us(source, 224, 64), by_timm(source, 224, 64)).mean()))
    result = {
        "images": count,
        "size": args.size,
        "accuracy_timm": round(100 * right["timm"] / count, 3),
        "accuracy_ours": round(100 * right["ours"] / count, 3),
        "accuracy_difference": round(100 * (right["ours"] - right["timm"]) / count, 3),
        "same_prediction": round(100 * same / count, 3),
        "mean_absolute_pixel_difference": {size: round(float(np.mean(v)), 4) for size, v in pixel.items()},
        "largest_pixel_difference": round(largest, 2),
    }
    for name, value in result.items():
        print(f"{name:32s} {value}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
