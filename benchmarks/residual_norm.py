"""A residual addition and the norm after it on one GPU: `python benchmarks/residual_norm.py --json --output OUTPUT`.

Forward and backward of s = x + scale * branch, y = norm(s), with a bfloat16 stream and float32 parameters, for norms
and scales of the registries: eager, torch.compile, and "absorbed", torch.compile without gain, shift and scale, which
`--precision bf16` multiplies into the adjacent matrices. With a float32 stream y is in bfloat16, as the linears of
autocast take it. All three run in one process on the same inputs, in turns, as replays of a CUDA graph of ten calls,
so that they show the device and not the host; the median turn counts. The floor is what must move, at the rate of
copies among ten tensors of the same size: forward x, branch, s and y; backward ds, dy, s and dx, and with a scale also
branch and its gradient. It is the floor of the first two; the third has less to move. When `--seconds` are over, the
rows that are left are named and not measured. results/residual_norm.md reports what was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fathoms.parts import NORMS, RESIDUALS
from fathoms.parts.norms.norm import split_affine
from timing import peak_mib

MAIN = (256 * 197, 384)
OTHERS = [(256 * 197, 192), (256 * 197, 768), (64 * 577, 384), (256 * 196, 384)]
SCALES = {"none": "none", "channel": "layerscale", "scalar": "rezero"}
CALLS, TURNS = 10, 9


class Row(NamedTuple):
    """One setting: tokens and channels, norm, scale, dtype of the stream."""

    size: tuple[int, int]
    norm: str
    scale: str
    stream: str = "bfloat16"


FIRST = [Row(MAIN, "layernorm", "channel"), Row(MAIN, "learnable_scaler", "channel")]
ROWS = [
    *FIRST,
    *(Row(size, "layernorm", "channel", "float32") for size in (MAIN, *OTHERS[:2])),
    *(Row(size, norm, "channel") for size in OTHERS[:2] for norm in ("layernorm", "learnable_scaler")),
    *(Row(MAIN, norm, "channel") for norm in ("rmsnorm", "dyt", "scalenorm", "derf", "none")),
    *(Row(size, "layernorm", "channel") for size in OTHERS[2:]),
    *(
        Row(MAIN, norm, "scalar")
        for norm in ("layernorm", "learnable_scaler", "rmsnorm", "dyt", "scalenorm", "derf")
    ),
    *(Row(size, "learnable_scaler", "channel") for size in OTHERS[2:]),
    *(Row(size, "layernorm", "none") for size in (MAIN, *OTHERS[:2])),
    *(
        Row(MAIN, norm, "none")
        for norm in ("learnable_scaler", "rmsnorm", "dyt", "scalenorm", "derf", "none")
    ),
    Row(MAIN, "none", "scalar"),
]


def main() -> None:
    """Measure the rows in order; the last line of the output is one JSON object with `--json`."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--first", action="store_true", help="only the first two rows")
    parser.add_argument("--seconds", type=float, default=75.0, help="begin no row after this time")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md, after every row")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report |= {"rows": [], "left_out": []}
    for row in FIRST if arguments.first else ROWS:
        if time.monotonic() - began > arguments.seconds:
            report["left_out"].append(row)
        else:
            report["rows"].append(measure(row))
            print(f"{as_line(report['rows'][-1])}  {time.monotonic() - began:.0f} s", flush=True)
        if arguments.output is not None:
            arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            arguments.output.with_suffix(".md").write_text(as_table(report))
    if report["left_out"]:
        print(f"left out, for want of time: {report['left_out']}")
    if arguments.json:
        print(json.dumps(report))


class ResidualNorm(nn.Module):
    """x + scale * branch and the norm of the next block, with the library's own parts."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        dim = row.size[1]
        self.scale = RESIDUALS.build(SCALES[row.scale], dim)
        self.norm = NORMS.build(row.norm, dim)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and the stream normalised."""
        stream = x + self.scale(branch)
        return stream, self.norm(stream).to(torch.bfloat16)


def absorbed(module: ResidualNorm, row: Row) -> ResidualNorm:
    """The same without gain, shift and scale, which the adjacent matrices then hold."""
    bare = ResidualNorm(row._replace(scale="none"))
    bare.norm = split_affine(module.norm)[0]
    return bare


def measure(row: Row) -> dict[str, Any]:
    """Every implementation of one row."""
    torch.compiler.reset()
    plain, leaves, grads = make_inputs(row)
    impls = {"eager": plain, "compiled": plain, "absorbed": absorbed(plain, row)}
    graphs: dict[Any, Replay] = {}
    peaks, kernels = {}, {}
    for name, module in impls.items():
        impl = module if name == "eager" else torch.compile(module, dynamic=False)
        learned = [*leaves, *module.parameters()]
        graphs[name, "forward_ms"] = capture(lambda impl=impl: impl(*leaves))

        def work(impl: Any = impl, learned: list[Tensor] = learned) -> object:
            return train(impl, leaves, learned, grads)

        graphs[name, "training_ms"] = capture(work)
        peaks[name] = peak_mib(work)
        kernels[name] = kernel_times(work) if row in FIRST else {}
    graphs["copies", "ms"] = capture_copies(row.size)
    times = in_turns(graphs)
    result: dict[str, Any] = {**row._asdict(), "copy_ms": times["copies", "ms"]}
    # NoNorm writes nothing of its own, and its backward pass adds the two gradients it is given.
    forward, backward = (3, 3) if row.norm == "none" else (4, 4)
    backward += 0 if row.scale == "none" else 2
    if row.stream == "float32":
        # x and s; ds, s and dx.
        forward, backward = forward + 2, backward + 3
    # A copy moves two tensors.
    result["floor"] = {
        "forward_ms": forward / 2 * result["copy_ms"],
        "training_ms": (forward + backward) / 2 * result["copy_ms"],
    }
    for name in impls:
        result[name] = {key: times[name, key] for key in ("forward_ms", "training_ms")}
        result[name] |= {"peak_mib": peaks[name], "kernels": kernels[name]}
    return result


def make_inputs(row: Row) -> tuple[ResidualNorm, list[Tensor], list[Tensor]]:
    """The module, its stream and branch, and gradients of both outputs."""
    torch.manual_seed(0)
    module = ResidualNorm(row).cuda()
    x, branch, ds, dy = (torch.randn(row.size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    x, ds = (tensor.to(getattr(torch, row.stream)) for tensor in (x, ds))
    return module, [x.requires_grad_(), branch.requires_grad_()], [ds, dy]


def train(
    impl: Callable[..., Any], leaves: list[Tensor], learned: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """One forward and backward pass."""
    return torch.autograd.grad(impl(*leaves), learned, grads)


class Replay(NamedTuple):
    """A CUDA graph, and the function it was made of, which holds its tensors."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]


def capture(work: Callable[[], object]) -> Replay:
    """Several calls as one CUDA graph, after warming up and compiling."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    return Replay(graph, work)


def capture_copies(size: tuple[int, int]) -> Replay:
    """Copies among ten tensors, about as many as one call touches, so that the cache helps both alike."""
    tensors = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(10)]

    pairs = itertools.cycle(zip(tensors[::2], tensors[1::2], strict=True))

    def copy() -> None:
        target, source = next(pairs)
        target.copy_(source)

    return capture(copy)


def in_turns(graphs: dict[Any, Replay]) -> dict[Any, float]:
    """Median milliseconds of one call of each, the graphs taking turns."""
    times: dict[Any, list[float]] = {name: [] for name in graphs}
    for turn in range(TURNS + 2):
        for name, replay in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay.graph.replay()
            end.record()
            end.synchronize()
            if turn > 1:
                times[name].append(start.elapsed_time(end) / CALLS)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def kernel_times(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if "CUDA" in str(event.device_type)]
    return {f"{place} {event.name[:80]}": event.device_time for place, event in enumerate(events)}


def as_line(row: dict[str, Any]) -> str:
    """One row as a line of text."""
    cells = [f"{row['size']!s:13} {row['norm']:16} {row['scale']:7} {row['stream']:8}"]
    times = [(name, row[name]) for name in ("eager", "compiled", "absorbed", "floor")]
    cells += [f"{name} {each['forward_ms']:.4f}/{each['training_ms']:.4f}" for name, each in times]
    return "  ".join(cells)


def as_table(report: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{report['device']}, torch {report['torch']}; forward / forward and backward, milliseconds.\n",
        "| tokens, channels | stream | norm | scale | eager | torch.compile | absorbed | floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cells = [f"{row['size'][0]:,}, {row['size'][1]}", row["stream"], row["norm"], row["scale"]]
        times = [row[name] for name in ("eager", "compiled", "absorbed", "floor")]
        cells += [f"{each['forward_ms']:.3f} / {each['training_ms']:.3f}" for each in times]
        lines.append(f"| {' | '.join(cells)} |")
    left = ", ".join(f"{row.norm} {row.scale} {row.size}" for row in report["left_out"])
    return "\n".join([*lines, *([f"\nNot measured, for want of time: {left}."] if left else [])]) + "\n"


if __name__ == "__main__":
    main()
