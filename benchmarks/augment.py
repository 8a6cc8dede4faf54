"""Time of the augmentation's parts on one device, form by form: `python benchmarks/augment.py --device cuda --json`.

The works: layers of a policy on bytes, RandomResizedCrop's resize, and the last steps (normalise, erase, mix), each
drawn before and on pictures that are on the device already. The forms: torch (operations as written), inductor (those
through torch.compile; it compiles for minutes, so only if asked for), triton, and copy,
which only copies the batch once a layer: no form that leaves its input alone can be quicker.

`host_ms` is the time until the calls return, with nothing before them. `device_ms` is taken between two events with the
device kept busy until everything is in its queue, so that it shows the device and not the host. `levels` and `share`
compare with the first form: largest difference, and share of the values that differ.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from fathoms.data.augment.masks import inside_boxes
from fathoms.data.augment.mix import MixOptions, draw_mixture
from fathoms.data.augment.policy import draw_layers, parse_policy
from fathoms.data.counter_rng import generator, sample_keys
from fathoms.data.crop.pixel_layout import Places
from fathoms.data.crop.random_crop import CropOptions, draw_boxes
from fathoms.data.device.backend import Forms, choose_forms
from fathoms.data.device.transfer import to_device

SHAPES = [(16384, 32), (256, 224)]
FORMS = ("torch", "inductor", "triton", "copy")
FILL = (124, 116, 104)
# Clocks that the device is kept busy for while the host fills its queue: a tenth of a second, about.
BUSY_CLOCKS = 200_000_000

Work = Callable[[], Tensor]

# The least that anything can cost: the batch read and written once a layer.
COPY = Forms(
    "copy",
    lambda pixels, places, size: pixels[: len(places.box) * 3 * size * size // 4].clone(),
    lambda images, _layer, _fill: images.clone(),
    lambda images, _scale, _shift, dtype, _drawn: images.to(dtype),
)


@torch.compile(dynamic=False)
def compiled_finish(images: Tensor, scale: Tensor, shift: Tensor, told: tuple[Tensor, ...]) -> Tensor:
    """The last steps on tensors alone, for torch.compile: every sample has a rectangle, if an empty one."""
    erased, box, partner, share, cut = told
    out = torch.where(inside_boxes(erased, *images.shape[2:])[:, None], 0.0, shift + images * scale)
    other = out.index_select(0, partner)
    kept = torch.where(inside_boxes(box, *images.shape[2:])[:, None], other, out)
    return torch.where(cut[:, None, None, None], kept, other + (out - other) * share[:, None, None, None])


def inductor_finish(
    images: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype, drawn: Finish
) -> Tensor:
    """`fathoms.data.augment.finish.finish` through torch.compile, with one rectangle at most."""
    assert drawn.erasing is not None
    assert drawn.mixture is not None
    top, left, tall, wide = drawn.erasing.rectangles[:, 0].T
    mixture = drawn.mixture
    arrays = [np.stack([top, top + tall, left, left + wide], 1), mixture.box, mixture.partner]
    told = to_device([*arrays, mixture.share.astype(np.float32), mixture.cut], images.device)
    return compiled_finish(images, scale, shift, tuple(told)).to(dtype)


def forms_of(name: str, device: torch.device) -> Forms:
    """A form by its name."""
    if name == "copy":
        return COPY
    forms = choose_forms(name, device)
    return dataclasses.replace(forms, finish=inductor_finish) if name == "inductor" else forms


def layers_of(policy: str) -> Callable[[int, int, Forms, torch.device], Work]:
    """A work: all layers of a policy on a batch."""

    def prepare(count: int, size: int, forms: Forms, device: torch.device) -> Work:
        layers = draw_layers(parse_policy(policy), keys_of(count))
        fill, own = torch.tensor(FILL, dtype=torch.uint8, device=device), pictures(count, size, device)

        def run() -> Tensor:
            out = own
            for layer in layers:
                out = forms.layer(out, layer, fill)
            return out

        return run

    return prepare


def resizing(count: int, size: int, forms: Forms, device: torch.device) -> Work:
    """A work: RandomResizedCrop of pictures of 32 x 32, or of photos, half of them mirrored."""
    sides = (32, 32) if size == 32 else (375, 500)
    keys, sizes = keys_of(count), np.tile(np.array([sides]), (count, 1))
    boxes, flips, cubic = draw_boxes(sizes, keys, CropOptions())
    area = sides[0] * sides[1]
    # Few pictures serve many crops: what is read does not depend on what the pixels are. Every form reads the same.
    torch.manual_seed(0)
    pixels = torch.randint(0, 2**24, (min(count, 512) * area,), dtype=torch.int32, device=device)
    offset = np.arange(count) % min(count, 512) * area
    places = Places(offset, np.full(count, sides[1]), sizes, boxes, flips, cubic)
    return lambda: forms.resize(pixels, places, size)


def finishing(count: int, size: int, forms: Forms, device: torch.device) -> Work:
    """A work: normalise, erase a quarter, mix."""
    keys, own = keys_of(count), pictures(count, size, device)
    scale, shift = (torch.rand(3, 1, 1, device=device) / 50 for _ in range(2))
    rectangles = draw_rectangles(keys, 0.25, 1, size, size)
    mixture = draw_mixture(
        MixOptions(mixup=0.8, cutmix=1.0, mode="elem"), generator(0, 0, "mix"), count, size, size
    )
    drawn = Finish(Erasing(rectangles, "const", keys), mixture)
    return lambda: forms.finish(own, scale, shift, torch.float32, drawn)


def keys_of(count: int) -> np.ndarray:
    """Keys of samples."""
    return sample_keys(0, 0, "policy", np.arange(count))


def pictures(count: int, size: int, device: torch.device) -> Tensor:
    """Random bytes, always the same."""
    torch.manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, device=device)


WORKS: dict[str, Callable[[int, int, Forms, torch.device], Work]] = {
    "rand-m9-mstd0.5-inc1": layers_of("rand-m9-mstd0.5-inc1"),
    "3a": layers_of("3a"),
    "resize": resizing,
    "finish": finishing,
}


def main() -> None:
    """Measure every work at every shape in every form; with `--json` the last line is one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, help="default: torch triton copy; on a CPU torch"
    )
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--count", type=int, help="pictures, instead of 16,384 small or 256 large ones")
    parser.add_argument("--size", type=int, help="only pictures of this size")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; give --device cpu")
    forms = arguments.forms or (["torch", "triton", "copy"] if device.type == "cuda" else ["torch"])
    shapes = [(arguments.count or count, size) for count, size in SHAPES if arguments.size in (None, size)]
    if not shapes:
        parser.error(f"--size {arguments.size}: give one of {', '.join(str(size) for _, size in SHAPES)}")
    rows = []
    print(
        f"{'work':24}{'pictures':>16}  {'form':10}{'host ms':>9}{'device ms':>11}{'levels':>8}{'share':>10}"
    )
    for name in arguments.works:
        for count, size in shapes:
            expected = None
            for form in forms:
                run = WORKS[name](count, size, forms_of(form, device), device)
                # The first result is the only one on the pictures as they were: some forms change them.
                found = run()
                row = {
                    "work": name,
                    "count": count,
                    "size": size,
                    "form": form,
                    **_difference(form, found, expected),
                }
                expected = found.clone() if expected is None else expected
                row |= {"host_ms": host_ms(run, device, arguments.repeats)}
                row |= {"device_ms": device_ms(run, device, arguments.repeats)}
                rows.append(row)
                print(_line(row), flush=True)
    if arguments.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        print(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}))


def host_ms(run: Work, device: torch.device, repeats: int) -> float:
    """Median time until the calls return; on a CPU that is all of it."""
    times = []
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    _synchronise(device)
    return statistics.median(times)


def device_ms(run: Work, device: torch.device, repeats: int) -> float | None:
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


def _difference(form: str, found: Tensor, expected: Tensor | None) -> dict[str, Any]:
    if expected is None or form == "copy":
        return {"levels": None, "share": None}
    difference = torch.where(found > expected, found - expected, expected - found)
    return {"levels": float(difference.max()), "share": int((difference > 0).sum()) / difference.numel()}


def _line(row: dict[str, Any]) -> str:
    pictures = f"{row['count']} x {row['size']}²"
    on_device = "" if row["device_ms"] is None else f"{row['device_ms']:.3f}"
    compared = f"{'':18}" if row["levels"] is None else f"{row['levels']:8.2g}{row['share']:10.1e}"
    return f"{row['work']:24}{pictures:>16}  {row['form']:10}{row['host_ms']:9.3f}{on_device:>11}{compared}"


if __name__ == "__main__":
    main()
