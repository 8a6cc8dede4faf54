"""Time of the augmentation's parts on one device, form by form: `python benchmarks/augment.py --device cuda --json`.

Layers of a policy are drawn before and applied to bytes that are on the device already. The forms: torch (operations
as written), inductor (those through torch.compile; it compiles for minutes, so only if asked for), triton, and copy,
which only copies the batch once a layer: no form that leaves its input alone can be quicker.

`host_ms` is the time until the calls return, with nothing before them. `device_ms` is taken between two events with the
device kept busy until everything is in its queue, so that it shows the device and not the host. `levels` and `share`
compare with the first form: largest difference, and share of the values that differ.
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

from fathoms.data.augment.apply import WRITTEN, apply_layer, compiled_kernels
from fathoms.data.augment.policy import Layer, draw_layers, parse_policy

SHAPES = [(16384, 32), (256, 224)]
FILL = (124, 116, 104)
# Clocks that the device is kept busy for while the host fills its queue: a tenth of a second, about.
BUSY_CLOCKS = 200_000_000

Apply = Callable[[Tensor, Layer, Tensor], Tensor]
Work = Callable[[], Any]


def torch_form() -> Apply:
    """The operations as written."""
    return lambda images, layer, fill: apply_layer(images, layer, fill, WRITTEN)


def inductor_form() -> Apply:
    """The operations through torch.compile."""
    kernels = compiled_kernels()
    return lambda images, layer, fill: apply_layer(images, layer, fill, kernels)


def triton_form() -> Apply:
    """The kernels."""
    from fathoms.data.triton.layer import apply_layer as apply

    return apply


def copy_form() -> Apply:
    """The least that a layer can cost: the batch read and written once."""
    return lambda images, _layer, _fill: images.clone()


FORMS: dict[str, Callable[[], Apply]] = {
    "torch": torch_form,
    "inductor": inductor_form,
    "triton": triton_form,
    "copy": copy_form,
}


def layers_of(policy: str) -> Callable[[Tensor, str], Work]:
    """A work: all layers of a policy on a batch, in one of the forms."""

    def prepare(images: Tensor, form: str) -> Work:
        layers = draw_layers(parse_policy(policy), np.arange(len(images), dtype=np.uint64) * 977 + 5)
        fill, apply = torch.tensor(FILL, dtype=torch.uint8, device=images.device), FORMS[form]()
        own = images.clone()

        def run() -> Tensor:
            out = own
            for layer in layers:
                out = apply(out, layer, fill)
            return out

        return run

    return prepare


WORKS: dict[str, Callable[[Tensor, str], Work]] = {
    "rand-m9-mstd0.5-inc1": layers_of("rand-m9-mstd0.5-inc1"),
    "3a": layers_of("3a"),
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
            torch.manual_seed(0)
            images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, device=device)
            expected = None
            for form in forms:
                run = WORKS[name](images, form)
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
    return {"levels": int(difference.max()), "share": int((difference > 0).sum()) / difference.numel()}


def _line(row: dict[str, Any]) -> str:
    pictures = f"{row['count']} x {row['size']}²"
    on_device = "" if row["device_ms"] is None else f"{row['device_ms']:.3f}"
    compared = f"{'':18}" if row["levels"] is None else f"{row['levels']:8}{row['share']:10.1e}"
    return f"{row['work']:24}{pictures:>16}  {row['form']:10}{row['host_ms']:9.3f}{on_device:>11}{compared}"


if __name__ == "__main__":
    main()
