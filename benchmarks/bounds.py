"""Every kernel once at odd sizes, for a tool that watches a GPU for reads and writes out of bounds.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python benchmarks/bounds.py

Without torch's cache every tensor is an allocation of its own, so that a step outside is seen as one.
"""

from __future__ import annotations

import argparse

import torch

from fathoms.ops.gelu import bias_gelu
from fathoms.ops.talking_heads import talking_heads

TALKING_HEADS = [("staged", (2, 8, 50, 48)), ("staged", (1, 3, 33, 24)), ("triton", (2, 4, 37, 48))]
GELU = [(100, 37), (257, 192), (1, 1)]
DTYPES = (torch.bfloat16, torch.float32)


def main() -> None:
    """Run each op forward and backward."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="only this one; else both")
    chosen = parser.parse_args().dtype
    for dtype in DTYPES if chosen is None else [getattr(torch, chosen)]:
        for impl, (batch, heads, tokens, width) in TALKING_HEADS:
            qkv = [
                torch.randn(batch, heads, tokens, width, device="cuda", dtype=dtype, requires_grad=True)
                for _ in range(3)
            ]
            mixers = [
                torch.randn(*shape, device="cuda", requires_grad=True)
                for shape in ((heads, heads), (heads,), (heads, heads), (heads,))
            ]
            talking_heads(*qkv, *mixers, scale=width**-0.5, impl=impl).sum().backward()
            print(f"talking_heads {impl} {(batch, heads, tokens, width)} {dtype}", flush=True)
        for shape in GELU:
            x = torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
            bias = torch.randn(shape[-1], device="cuda", requires_grad=True)
            bias_gelu(x, bias, impl="triton").sum().backward()
            print(f"bias_gelu {shape} {dtype}", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
