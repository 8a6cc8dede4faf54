"""Run every kernel once at odd sizes, under a tool that finds reads and writes out of bounds on a GPU.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python benchmarks/bounds.py

Without torch's cache every tensor is an allocation of its own, so that an access outside it is found. With the cache
this refuses to run.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np
import torch

from fathoms.data.augment.erase_and_mix import Erasing, Finish, MixOptions, draw_mixture, draw_rectangles
from fathoms.data.augment.launches import CODES
from fathoms.data.augment.pipeline import choose_backend
from fathoms.data.augment.policies import Layer
from fathoms.data.counter_rng import generator, sample_keys
from fathoms.data.images.pixels import PixelLayout
from fathoms.ops.attention_ops import talking_heads
from fathoms.ops.gelu import bias_gelu

TALKING_HEADS = [(2, 8, 50, 48), (1, 3, 33, 24), (2, 4, 37, 48)]
GELU = [(100, 37), (257, 192), (1, 1)]
DTYPES = (torch.bfloat16, torch.float32)
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def main() -> None:
    """Run each op forward and backward."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="only this one; else both")
    chosen = parser.parse_args().dtype
    if os.environ.get(UNCACHED) != "1":
        print(
            f"bounds: tensors would share allocations and hide an access outside; set {UNCACHED}=1",
            file=sys.stderr,
        )
        sys.exit(2)
    for dtype in DTYPES if chosen is None else [getattr(torch, chosen)]:
        for batch, heads, tokens, width in TALKING_HEADS:
            qkv = [
                torch.randn(batch, heads, tokens, width, device="cuda", dtype=dtype, requires_grad=True)
                for _ in range(3)
            ]
            mixers = [
                torch.randn(*shape, device="cuda", requires_grad=True)
                for shape in ((heads, heads), (heads,), (heads, heads), (heads,))
            ]
            talking_heads(*qkv, *mixers, scale=width**-0.5, impl="triton").sum().backward()
            print(f"talking_heads {(batch, heads, tokens, width)} {dtype}", flush=True)
        for shape in GELU:
            x = torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
            bias = torch.randn(shape[-1], device="cuda", requires_grad=True)
            bias_gelu(x, bias, impl="triton").sum().backward()
            print(f"bias_gelu {shape} {dtype}", flush=True)
    images()
    torch.cuda.synchronize()


def images() -> None:
    """The kernels for images at odd sizes: crop boxes that reach outside, every operation, erasing and mixing."""
    device, rng = torch.device("cuda"), np.random.default_rng(0)
    backend = choose_backend("triton", device)
    sides, keys = np.array([[37, 53], [1, 9], [130, 20]]), sample_keys(0, 0, "policy", np.arange(3))
    area = sides.prod(1)
    box = np.array([[-3, 4, 40, 60], [0, 0, 1, 9], [5, -2, 90, 30]])
    flags = np.array([True, False, True])
    places = PixelLayout(np.cumsum(area) - area, sides[:, 1], sides, box, flags, ~flags)
    words = torch.randint(0, 2**24, (int(area.sum()),), dtype=torch.int32, device=device)
    fill = torch.zeros(3, dtype=torch.uint8, device=device)
    one = torch.ones(3, 1, 1, device=device)
    for size in (33, 16):
        images = backend.resize(words, places, size)
        for kind in CODES:
            layer = Layer({kind: np.arange(3)}, rng.uniform(0.1, 0.4, 3), flags)
            images = backend.layer(images, layer, fill)
        erasing = Erasing(draw_rectangles(keys, 1.0, 2, size, size), "pixel", keys)
        mixture = draw_mixture(
            MixOptions(mixup=0.8, cutmix=1.0, mixup_mode="elem"), generator(0, 0, "mix"), 3, size, size
        )
        backend.finish(images, one, one, torch.bfloat16, Finish(erasing, mixture))
        print(f"images of {size} pixels", flush=True)


if __name__ == "__main__":
    main()
