"""Time, memory and exactness of the operations on one GPU: `python benchmarks/ops.py --output results/ops`.

Talking heads, forward and forward+backward, in bfloat16, in one process on the same inputs: the reference
of this library (eager and torch.compile), torch.compile of timm's code (heads moved last, two linear layers),
the Triton kernels (what impl="auto" takes), and plain attention without mixing. Times are replays of a CUDA
graph, so that they show the device and not the host; `*_launched_ms` are the same calls launched one by one.
The floor is the longest of: matrix products at the measured matrix rate, mixing at the fp32 rate, exponentials at
16 per clock and multiprocessor, and each input and output moved once at the measured copy rate.

Class attention of one query, in the same way: with keys and values (eager and torch.compile) and absorbed (eager, what
impl="auto" takes, and torch.compile). Its floor is the context read once forward, and once more and its gradient
written backward, at the measured copy rate.

GELU of a layer's output and its bias, likewise: eager, torch.compile and the kernels. Its floor is the bytes
alone: one read and one write forward, two reads and one write backward.

A whole MLP without a gradient: eager, torch.compile and the kernel. Its floor is the products at the measured matrix
rate, or each input and output moved once at the measured copy rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fathoms.ops.attention_ops import (
    class_attention,
    class_attention_reference,
    talking_heads,
    talking_heads_reference,
)
from fathoms.ops.gelu import bias_gelu, bias_gelu_reference
from result_rows import load_report, save_report
from timing import device_limits, forward, peak_mib, replay_ms, time_ms

SHAPES = [(256, 8, 196, 48), (64, 8, 576, 48), (256, 4, 196, 48), (64, 6, 576, 48), (32, 16, 576, 48)]
# Tokens of 256 images at 196 patches and a class token; four times 384 and 192 channels.
GELU_SHAPES = [(50432, 1536), (50432, 768)]
NAMES = ("dq", "dk", "dv", "d_logit_weight", "d_logit_bias", "d_prob_weight", "d_prob_bias")
# Images, tokens of the context, channels, heads: CaiT-S24 at 224 and at 384 pixels.
CLASS_SHAPES = [(256, 196, 384, 8), (64, 576, 384, 8)]
CLASS_NAMES = ("dq", "d_queries", "d_context", "d_key_weight", "d_key_bias", "d_value_weight", "d_value_bias")
# The softmax cancels these: their gradients are zero, and no error is relative to that.
CANCELLED = ("d_logit_bias", "d_key_bias")
# Multiply-adds per clock and multiprocessor outside the tensor cores, and exponentials (CUDA programming guide, 9.0).
FP32_PER_CLOCK, EXP_PER_CLOCK = 128, 16
# Clocks per millisecond of an H200 under load, as nvidia-smi showed it.
CLOCKS_PER_MS = 1_980_000


def main() -> None:
    """Measure every shape, a line each; with `--json` the last line is one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument(
        "--output", type=Path, help="write OUTPUT.json after every row; other rows there stay"
    )
    ops = ("talking_heads", "class_attention", "bias_gelu")
    parser.add_argument("--op", choices=ops, help="only this one")
    parser.add_argument(
        "--shape", type=int, nargs=4, action="append", metavar=("B", "H", "N", "K"), help="of talking heads"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one")
    if arguments.shape and arguments.op not in (None, "talking_heads"):
        parser.error("--shape is of talking heads; leave it out")
    limits = device_limits()
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **limits}
    report = load_report(arguments.output)
    for op, shapes, measure, as_line in (
        ("talking_heads", arguments.shape or SHAPES, measure_talking_heads, talking_heads_line),
        ("class_attention", CLASS_SHAPES, measure_class_attention, class_attention_line),
        ("bias_gelu", GELU_SHAPES, measure_gelu, gelu_line),
    ):
        if arguments.op not in (None, op):
            continue
        for shape in shapes:
            row = where | measure(tuple(shape), limits)
            report["rows"][f"{op} {'x'.join(map(str, shape))}"] = row
            print(as_line(row), flush=True)
            save_report(report, arguments.output)
    if arguments.json:
        print(json.dumps(report))


def measure_talking_heads(shape: tuple[int, int, int, int], limits: dict[str, float]) -> dict[str, Any]:
    """Every implementation at one shape."""
    torch.compiler.reset()
    scale = shape[3] ** -0.5
    leaves, grad = make_inputs(shape)
    impls: dict[str, Callable[..., Tensor]] = {
        "eager": lambda *x: talking_heads_reference(*x, scale=scale),
        "compiled": torch.compile(lambda *x: talking_heads_reference(*x, scale=scale), dynamic=False),
        "compiled_timm": torch.compile(lambda *x: timm_talking_heads(*x, scale=scale), dynamic=False),
        "triton": lambda *x: talking_heads(*x, scale=scale, impl="triton"),
        "sdpa": lambda q, k, v, *_: scaled_dot_product_attention(q, k, v, scale=scale),
    }
    row: dict[str, Any] = {"shape": shape, "floor": floor(shape, limits)}
    for name, impl in impls.items():
        row[name] = timings(impl, leaves[:3] if name == "sdpa" else leaves, grad)
    compared = {name: impls[name] for name in ("triton", "eager")}
    row["errors"] = errors(compared, impls["eager"], NAMES, *make_inputs((4, *shape[1:])))
    for key in ("forward_ms", "training_ms"):
        row[f"speedup_{key[:-3]}"] = row["compiled"][key] / row["triton"][key]
        row[f"speedup_over_timm_{key[:-3]}"] = row["compiled_timm"][key] / row["triton"][key]
        row[f"times_sdpa_{key[:-3]}"] = row["triton"][key] / row["sdpa"][key]
        row[f"share_of_floor_{key[:-3]}"] = row["floor"][key] / row["triton"][key]
    return row


def measure_class_attention(shape: tuple[int, int, int, int], limits: dict[str, float]) -> dict[str, Any]:
    """Every implementation at one shape, with one query."""
    torch.compiler.reset()
    leaves, grad = make_class_inputs(shape)
    impls: dict[str, Callable[..., Tensor]] = {
        "plain": class_attention_reference,
        "compiled": torch.compile(class_attention_reference, dynamic=False),
        "absorbed": lambda *x: class_attention(*x, impl="absorbed"),
        "absorbed_compiled": torch.compile(lambda *x: class_attention(*x, impl="absorbed"), dynamic=False),
    }
    context_ms = leaves[2].nbytes / (limits["copy_tbps"] * 1e9)
    row: dict[str, Any] = {
        "shape": shape,
        "floor": {"forward_ms": context_ms, "training_ms": 3 * context_ms},
        **{name: timings(impl, leaves, grad) for name, impl in impls.items()},
    }
    row["errors"] = errors(impls, impls["plain"], CLASS_NAMES, *make_class_inputs((4, *shape[1:])))
    for key in ("forward_ms", "training_ms"):
        row[f"speedup_{key[:-3]}"] = row["compiled"][key] / row["absorbed_compiled"][key]
        row[f"speedup_eager_{key[:-3]}"] = row["plain"][key] / row["absorbed"][key]
        row[f"share_of_floor_{key[:-3]}"] = row["floor"][key] / row["absorbed_compiled"][key]
    return row


def timings(impl: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> dict[str, float]:
    """Time of a pass and of one with its gradients, and the memory of that."""
    return {
        "forward_launched_ms": time_ms(lambda: forward(impl, leaves)),
        "training_launched_ms": time_ms(lambda: train(impl, leaves, grad)),
        "forward_ms": replay_ms(lambda: forward(impl, leaves)),
        "training_ms": replay_ms(lambda: train(impl, leaves, grad)),
        "peak_mib": peak_mib(lambda: train(impl, leaves, grad)),
    }


def timm_talking_heads(
    q: Tensor, k: Tensor, v: Tensor, wl: Tensor, bl: Tensor, ww: Tensor, bw: Tensor, *, scale: float
) -> Tensor:
    """Talking-heads attention of timm between its projections."""
    attention = (q * scale) @ k.transpose(-2, -1)
    attention = linear(attention.permute(0, 2, 3, 1), wl, bl).permute(0, 3, 1, 2).softmax(-1)
    return linear(attention.permute(0, 2, 3, 1), ww, bw).permute(0, 3, 1, 2) @ v


def make_inputs(shape: tuple[int, int, int, int]) -> tuple[list[Tensor], Tensor]:
    """Leaves as a model has them (views of a packed qkv; weights in bfloat16, as under autocast), and a gradient."""
    batch, heads, tokens, channels = shape
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = torch.randn(batch, tokens, 3, heads, channels, **options).permute(2, 0, 3, 1, 4)
    weights = [torch.eye(heads, **options) + 0.3 * torch.randn(heads, heads, **options) for _ in range(2)]
    biases = [0.1 * torch.randn(heads, **options) for _ in range(2)]
    leaves = [q, k, v, weights[0], biases[0], weights[1], biases[1]]
    grad = torch.randn(batch, tokens, heads, channels, **options).transpose(1, 2)
    return [x.detach().requires_grad_() for x in leaves], grad


def make_class_inputs(shape: tuple[int, int, int, int]) -> tuple[list[Tensor], Tensor]:
    """One query an image, its context and the projections of keys and values, all in bfloat16, and a gradient."""
    batch, tokens, dim, heads = shape
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, 1, heads, dim // heads, **options).transpose(1, 2)
    read = [torch.randn(batch, count, dim, **options) for count in (1, tokens)]
    weights = [torch.randn(dim, dim, **options) * dim**-0.5 for _ in range(2)]
    biases = [0.1 * torch.randn(dim, **options) for _ in range(2)]
    leaves = [q, *read, weights[0], biases[0], weights[1], biases[1]]
    return [x.detach().requires_grad_() for x in leaves], torch.randn_like(q)


def train(impl: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """One forward and backward pass."""
    return torch.autograd.grad(impl(*leaves), leaves, grad)


def errors(
    impls: dict[str, Callable[..., Tensor]],
    reference: Callable[..., Tensor],
    names: tuple[str, ...],
    leaves: list[Tensor],
    grad: Tensor,
) -> dict[str, dict[str, float]]:
    """Relative errors of each implementation against the reference in float64; infinite where one is NaN."""
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = outcome(reference, names, exact_leaves, grad.double())
    result: dict[str, dict[str, float]] = {}
    for name, impl in impls.items():
        values = outcome(impl, names, leaves, grad)
        for key in exact:
            if key not in CANCELLED:
                ratio = (values[key].double() - exact[key]).norm() / exact[key].norm()
                # A NaN compares with nothing, and must not pass for a small number.
                result.setdefault(name, {})[key] = ratio.nan_to_num(nan=math.inf).item()
    return result


def outcome(
    impl: Callable[..., Tensor], names: tuple[str, ...], leaves: list[Tensor], grad: Tensor
) -> dict[str, Tensor]:
    """Output and gradients by name."""
    out = impl(*leaves)
    return {"out": out.detach(), **dict(zip(names, torch.autograd.grad(out, leaves, grad), strict=True))}


def floor(shape: tuple[int, int, int, int], limits: dict[str, float]) -> dict[str, float]:
    """The shortest possible times in ms where heads are mixed outside the tensor cores, and those of each unit."""
    batch, heads, tokens, channels = shape
    places = batch * tokens * tokens
    clocks = torch.cuda.get_device_properties(0).multi_processor_count * CLOCKS_PER_MS
    tensor_bytes = 2 * batch * heads * tokens * channels
    times = []
    # Forward: two products, two mixings, q k v out. Training adds the products for S, dA, dq, dk, dv, four mixings
    # (two of gradients, two of weights, besides those of the forward pass made again), and q k v dout dq dk dv.
    for products, mixings, exponentials, tensors in ((2, 2, 1, 4), (7, 8, 2, 11)):
        times.append(
            {
                "matrix": products * 2 * places * heads * channels / (limits["matrix_tflops"] * 1e9),
                "mixing": mixings * places * heads**2 / (FP32_PER_CLOCK * clocks),
                "exponentials": exponentials * places * heads / (EXP_PER_CLOCK * clocks),
                "bytes": tensors * tensor_bytes / (limits["copy_tbps"] * 1e9),
            }
        )
    return {
        "forward_ms": max(times[0].values()),
        "training_ms": max(times[1].values()),
        **{f"training_{unit}_ms": value for unit, value in times[1].items()},
    }


def talking_heads_line(row: dict[str, Any]) -> str:
    """One shape of talking heads as a line of text."""
    over_timm = f"over timm {row['speedup_over_timm_forward']:.2f}/{row['speedup_over_timm_training']:.2f}"
    impls = ("eager", "compiled", "compiled_timm", "triton", "sdpa")
    return as_line(row, impls, over_timm, "triton", "eager")


def class_attention_line(row: dict[str, Any]) -> str:
    """One shape of class attention as a line of text."""
    eager = f"eager {row['speedup_eager_forward']:.2f}/{row['speedup_eager_training']:.2f}"
    impls = ("plain", "compiled", "absorbed", "absorbed_compiled")
    return as_line(row, impls, eager, "absorbed_compiled", "plain")


def as_line(row: dict[str, Any], impls: tuple[str, ...], other: str, own: str, plain: str) -> str:
    """One shape as a line of text: times, memory, speed-ups, and the worst ratio of `own`'s error to `plain`'s."""
    cells = [f"{tuple(row['shape'])!s:22}"]
    for name in impls:
        times = row[name]
        cells.append(
            f"{name} {times['forward_ms']:.3f}/{times['training_ms']:.3f} ms {times['peak_mib']:.0f} MiB"
        )
    cells.append(f"speedup {row['speedup_forward']:.2f}/{row['speedup_training']:.2f}")
    cells.append(other)
    cells.append(f"floor {row['share_of_floor_forward']:.0%}/{row['share_of_floor_training']:.0%}")
    worst = max(row["errors"][own][key] / row["errors"][plain][key] for key in row["errors"][own])
    return "  ".join([*cells, f"worst error {worst:.2f} of the reference's"])


def measure_gelu(shape: tuple[int, int], limits: dict[str, float]) -> dict[str, Any]:
    """gelu(x + bias) in every implementation, at one shape."""
    torch.compiler.reset()
    tokens, channels = shape
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, grad = torch.randn(2, tokens, channels, **options)
    leaves = [x.detach().requires_grad_(), torch.randn(channels, **options).requires_grad_()]
    impls: dict[str, Callable[..., Tensor]] = {
        "eager": bias_gelu_reference,
        "compiled": torch.compile(bias_gelu_reference, dynamic=False),
        "triton": lambda *x: bias_gelu(*x, impl="triton"),
    }
    once = grad.nbytes / (limits["copy_tbps"] * 1e9)
    row: dict[str, Any] = {
        "shape": shape,
        "floor": {"forward_ms": 2 * once, "training_ms": 5 * once},
    }
    for name, impl in impls.items():
        row[name] = timings(impl, leaves, grad)
    for key in ("forward_ms", "training_ms"):
        row[f"speedup_{key[:-3]}"] = row["compiled"][key] / row["triton"][key]
        row[f"share_of_floor_{key[:-3]}"] = row["floor"][key] / row["triton"][key]
    return row


def gelu_line(row: dict[str, Any]) -> str:
    """One shape of GELU as a line of text."""
    times = [
        f"{name} {row[name]['forward_ms']:.3f}/{row[name]['training_ms']:.3f} ms"
        for name in ("eager", "compiled", "triton")
    ]
    speedup = f"speedup {row['speedup_forward']:.2f}/{row['speedup_training']:.2f}"
    share = f"floor {row['share_of_floor_forward']:.0%}/{row['share_of_floor_training']:.0%}"
    return "  ".join([f"bias_gelu {tuple(row['shape'])}", *times, speedup, share])


if __name__ == "__main__":
    main()
