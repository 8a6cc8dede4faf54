"""Tiles of the talking-heads kernels, by measurement: `python benchmarks/talking_heads_tiles.py --output tiles.json`.

Every tile of each kernel is timed by itself at the sizes of cait_s24_224, cait_s24_384 and cait_m36_384, then whole
passes with the best of each, for several sizes of the scratch. Kernels are compiled first, in as many processes as the
machine has cores. About two minutes on one GPU with 16 cores; what it chooses are the constants of
fathoms.ops.triton.talking_heads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fathoms.ops.triton.talking_heads as kernels
from fathoms.ops.triton.talking_heads import Tile

SHAPES = [(256, 8, 196, 48), (64, 8, 576, 48), (16, 16, 576, 48)]
SCRATCHES = [32, 64, 128, 256, 512, 1024]
PRODUCTS = {
    "outer": [Tile(*each) for each in itertools.product((64, 128), (64, 128), (4, 8), (3,))],
    "inner": [Tile(*each) for each in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4))],
}
# Iterations, keys at a time, warps; with enough keys at a time a row is read once.
MIXES = [
    Tile(turns, keys, warps, 1)
    for turns, (keys, warps) in itertools.product(
        (1, 2, 4), [(64, 1), (128, 1), (128, 2), (256, 2), (256, 4), (512, 4), (512, 8), (1024, 8)]
    )
]
CANDIDATES = {**PRODUCTS, "mix": MIXES, "grad": MIXES}


def use(name: str, tile: Tile) -> None:
    """Let a kernel use a tile, for rows of any length."""
    kernels.TILES[name] = tile
    if name in kernels.SHORT_TILES:
        kernels.SHORT_TILES[name] = tile


def present(name: str, tokens: int) -> Tile:
    """The tile that a kernel uses."""
    short = tokens <= kernels.SHORT and name in kernels.SHORT_TILES
    return (kernels.SHORT_TILES if short else kernels.TILES)[name]


def inputs(shape: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    """Queries, keys, values, a gradient and both mixing matrices of random numbers."""
    torch.manual_seed(0)
    batch, heads, tokens, channels = shape
    qkv = torch.randn(batch, tokens, 3, heads, channels, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    wl, ww = torch.randn(2, heads, heads, device="cuda", dtype=torch.bfloat16) / heads**0.5
    return {"q": q, "k": k, "v": v, "grad": torch.randn_like(q), "wl": wl, "ww": ww}


def work(name: str, x: dict[str, torch.Tensor]) -> Callable[[], object]:
    """One launch of a kernel on maps of logits; mixing is in place, which changes the numbers and not the time."""
    maps, grads = kernels._scratch(x["q"], 2)
    part = x["q"][: len(maps)]
    for each in (maps, grads):
        kernels._outer(part, x["k"][: len(part)], each, 0.1)
    out = kernels.empty_like_rows(x["q"])
    if name == "outer":
        return lambda: kernels._outer(part, x["k"][: len(part)], maps, 0.1)
    if name == "inner":
        # As often the one as the other: a backward pass has two of each.
        def both() -> None:
            for transposed in (False, True):
                kernels._inner(maps, x["v"][: len(part)], out[: len(part)], 1.0, transposed=transposed)

        return both
    if name == "mix":
        return lambda: kernels._mix(maps, part, x["wl"], x["ww"], None)
    return lambda: kernels._mix_grad(maps, grads, part, x["wl"], x["ww"], None)


def milliseconds(run: Callable[[], object]) -> float:
    """Median of replays."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(run, rep=10, return_mode="median"))


def whole(x: dict[str, torch.Tensor]) -> dict[str, float]:
    """A forward and a backward pass."""
    ahead = (x["q"], x["k"], x["v"], x["wl"], None, x["ww"], None, 0.1)
    back = (x["grad"], x["q"], x["k"], x["v"], x["wl"], x["ww"], None, 0.1)
    return {
        "forward": milliseconds(lambda: kernels.talking_heads_forward(*ahead)),
        "backward": milliseconds(lambda: kernels.talking_heads_backward(*back)),
    }


def compile_share(share: int, shares: int) -> None:
    """Compile every n-th candidate into Triton's cache."""
    for shape in SHAPES:
        x = inputs(shape)
        for number, (name, tile) in enumerate((n, t) for n, tiles in CANDIDATES.items() for t in tiles):
            if number % shares == share:
                use(name, tile)
                try:
                    work(name, x)()
                except Exception as error:  # noqa: BLE001 (a tile that does not fit is found again, and said, when timed)
                    print(f"{name} {tuple(tile)}: {str(error)[:100]}", file=sys.stderr)
        torch.cuda.empty_cache()


def main() -> None:
    """Compile in several processes, then time one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one")
    if arguments.share:
        return compile_share(*arguments.share)
    count = max(1, (os.cpu_count() or 1) - 2)
    waiting = [
        subprocess.Popen(
            [sys.executable, __file__, "--share", str(share), str(count)], stderr=subprocess.DEVNULL
        )
        for share in range(count)
    ]
    for process in waiting:
        process.wait()
    report = measure()
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return None


def measure() -> dict[str, Any]:
    """Milliseconds of each kernel with each tile, and of whole passes with the present tiles and with the best."""
    scratch = kernels.SCRATCH
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shapes": {},
    }
    for shape in SHAPES:
        x = inputs(shape)
        before = {name: present(name, shape[2]) for name in CANDIDATES}
        row: dict[str, Any] = {"present": whole(x), "kernels": {}}
        best: dict[str, Tile] = {}
        for name, tiles in CANDIDATES.items():
            found: dict[Tile, float] = {}
            for tile in tiles:
                use(name, tile)
                try:
                    found[tile] = milliseconds(work(name, x))
                except Exception as error:  # noqa: BLE001 (out of registers or shared memory: not a candidate)
                    print(f"{name} {tuple(tile)}: {str(error)[:100]}")
            use(name, before[name])
            own = milliseconds(work(name, x))
            best[name] = min(found, key=found.__getitem__)
            ranked = sorted(found.items(), key=lambda pair: pair[1])
            row["kernels"][name] = {"present": own, "tiles": [[list(tile), took] for tile, took in ranked]}
            print(
                shape,
                name,
                f"present {own:.3f}",
                [(tuple(t), round(ms, 3)) for t, ms in ranked[:4]],
                flush=True,
            )
        for name, tile in best.items():
            use(name, tile)
        row["by scratch, MiB"] = {}
        for mib in SCRATCHES:
            kernels.SCRATCH = mib << 20
            row["by scratch, MiB"][mib] = whole(x)
        for name, tile in before.items():
            use(name, tile)
        kernels.SCRATCH = scratch
        print(shape, row["present"], row["by scratch, MiB"], flush=True)
        report["shapes"][" ".join(map(str, shape))] = row
        torch.cuda.empty_cache()
    return report


if __name__ == "__main__":
    main()
