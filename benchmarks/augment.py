"""Time the parts of augmentation on one device, per backend: `python benchmarks/augment.py --device cuda --json`.

The tasks: layers of a policy on bytes, RandomResizedCrop's resize, and the last steps (normalise, erase, mix), each
drawn in advance and on images that are on the device already. The backends: torch, triton, and copy, which only copies
the batch once a layer: no backend that leaves its input alone can be faster.

`host_ms` is the time until the calls return, with nothing before them. `device_ms` is taken between two events with the
device kept busy until everything is in its queue, so that it shows the device and not the host. `levels` and `share`
compare with the first backend: largest difference, and share of the values that differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fathoms.data.augment.erase import draw_rectangles
from fathoms.data.augment.finish import Erasing, Finish
from fathoms.data.augment.mix import MixOptions, draw_mixture
from fathoms.data.augment.policy import draw_layers, parse_policy
from fathoms.data.counter_rng import generator, sample_keys
from fathoms.data.crop.pixel_buffer import PixelLayout
from fathoms.data.crop.random_crop import CropOptions, draw_boxes
from fathoms.data.device.backend import Backend, choose_backend

SHAPES = [(16384, 32), (256, 224)]
BACKENDS = ("torch", "triton", "copy")
FILL = (124, 116, 104)
# Clocks that the device is kept busy for while the host fills its queue: a tenth of a second, about.
BUSY_CLOCKS = 200_000_000

Task = Callable[[], Tensor]

# The least that any backend can cost: the batch read and written once a layer.
COPY = Backend(
    "copy",
    lambda pixels, places, size: pixels[: len(places.box) * 3 * size * size // 4].clone(),
    lambda images, _layer, _fill: images.clone(),
    lambda images, _scale, _shift, dtype, _drawn: images.to(dtype),
)


def backend_of(name: str, device: torch.device) -> Backend:
    """A backend by its name."""
    return COPY if name == "copy" else choose_backend(name, device)


def layers_of(policy: str) -> Callable[[int, int, Backend, torch.device], Task]:
    """A task: all layers of a policy on a batch."""

    def prepare(count: int, size: int, backend: Backend, device: torch.device) -> Task:
        layers = draw_layers(parse_policy(policy), keys_of(count))
        fill, own = torch.tensor(FILL, dtype=torch.uint8, device=device), random_images(count, size, device)

        def run() -> Tensor:
            out = own
            for layer in layers:
                out = backend.layer(out, layer, fill)
            return out

        return run

    return prepare


def resizing(count: int, size: int, backend: Backend, device: torch.device) -> Task:
    """A task: RandomResizedCrop of images of 32 x 32, or of photos, half of them mirrored."""
    sides = (32, 32) if size == 32 else (375, 500)
    keys, sizes = keys_of(count), np.tile(np.array([sides]), (count, 1))
    boxes, flips, cubic = draw_boxes(sizes, keys, CropOptions())
    area = sides[0] * sides[1]
    # Few images serve many crops: the time does not depend on the pixels. Every backend reads the same ones.
    torch.manual_seed(0)
    pixels = torch.randint(0, 2**24, (min(count, 512) * area,), dtype=torch.int32, device=device)
    offset = np.arange(count) % min(count, 512) * area
    places = PixelLayout(offset, np.full(count, sides[1]), sizes, boxes, flips, cubic)
    return lambda: backend.resize(pixels, places, size)


def finishing(count: int, size: int, backend: Backend, device: torch.device) -> Task:
    """A task: normalise, erase a quarter, mix."""
    keys, own = keys_of(count), random_images(count, size, device)
    scale, shift = (torch.rand(3, 1, 1, device=device) / 50 for _ in range(2))
    rectangles = draw_rectangles(keys, 0.25, 1, size, size)
    mixture = draw_mixture(
        MixOptions(mixup=0.8, cutmix=1.0, mixup_mode="elem"), generator(0, 0, "mix"), count, size, size
    )
    drawn = Finish(Erasing(rectangles, "const", keys), mixture)
    return lambda: backend.finish(own, scale, shift, torch.float32, drawn)


def keys_of(count: int) -> np.ndarray:
    """Keys of samples."""
    return sample_keys(0, 0, "policy", np.arange(count))


def random_images(count: int, size: int, device: torch.device) -> Tensor:
    """Random bytes from a fixed seed."""
    torch.manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, device=device)


TASKS: dict[str, Callable[[int, int, Backend, torch.device], Task]] = {
    "rand-m9-mstd0.5-inc1": layers_of("rand-m9-mstd0.5-inc1"),
    "3a": layers_of("3a"),
    "resize": resizing,
    "finish": finishing,
}


def main() -> None:
    """Measure every task at every shape on every backend; with `--json` the last line is one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, help="default: torch triton copy; on a CPU torch"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--count", type=int, help="images, instead of 16,384 small or 256 large ones")
    parser.add_argument("--size", type=int, help="only images of this size")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; give --device cpu")
    backends = arguments.backends or (["torch", "triton", "copy"] if device.type == "cuda" else ["torch"])
    shapes = [(arguments.count or count, size) for count, size in SHAPES if arguments.size in (None, size)]
    if not shapes:
        parser.error(f"--size {arguments.size}: give one of {', '.join(str(size) for _, size in SHAPES)}")
    rows = []
    print(
        f"{'task':24}{'images':>16}  {'backend':10}{'host ms':>9}{'device ms':>11}{'levels':>8}{'share':>10}"
    )
    for name in arguments.tasks:
        for count, size in shapes:
            expected = None
            for backend in backends:
                run = TASKS[name](count, size, backend_of(backend, device), device)
                # Only the first result is of the original images: some backends change them in place.
                found = run()
                row = {
                    "task": name,
                    "count": count,
                    "size": size,
                    "backend": backend,
                    **_difference(backend, found, expected),
                }
                expected = found.clone() if expected is None else expected
                row |= {"host_ms": host_ms(run, device, arguments.repeats)}
                row |= {"device_ms": device_ms(run, device, arguments.repeats)}
                rows.append(row)
                print(_line(row), flush=True)
    if arguments.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        print(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}))


def host_ms(run: Task, device: torch.device, repeats: int) -> float:
    """Median time until the calls return; on a CPU that is all of it."""
    times = []
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    _synchronise(device)
    return statistics.median(times)


def device_ms(run: Task, device: torch.device, repeats: int) -> float | None:
    """Median time of the device alone; None on a CPU."""
    if device.type != "cuda":
        return None
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CLOCKS)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _difference(backend: str, found: Tensor, expected: Tensor | None) -> dict[str, Any]:
    if expected is None or backend == "copy":
        return {"levels": None, "share": None}
    difference = torch.where(found > expected, found - expected, expected - found)
    return {"levels": float(difference.max()), "share": int((difference > 0).sum()) / difference.numel()}


def _line(row: dict[str, Any]) -> str:
    images = f"{row['count']} x {row['size']}²"
    on_device = "" if row["device_ms"] is None else f"{row['device_ms']:.3f}"
    compared = f"{'':18}" if row["levels"] is None else f"{row['levels']:8.2g}{row['share']:10.1e}"
    return f"{row['task']:24}{images:>16}  {row['backend']:10}{row['host_ms']:9.3f}{on_device:>11}{compared}"


if __name__ == "__main__":
    main()
