"""A residual join and the norm behind it on one GPU: `python benchmarks/joins.py --json --output results/joins`.

Forward and backward of s = x + scale * branch, y = norm(s), with a bfloat16 stream and float32 parameters, for norms
and scales of the registries: eager, torch.compile, and `fathoms.ops.add_norm`. All forms run in one process on the
same inputs, in turns, as replays of a CUDA graph of ten calls, so that they show the device and not the host; the
median turn counts. The floor is what must move, at the rate of copies among as many tensors of that same size: forward
x, branch, s and y; backward ds, dy, s and dx, and under a scale branch and its gradient. `--tiles` first tries cuts of
the kernels and takes the best. When `--seconds` are over, the rows that are left are named and not measured.
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
from torch.nn import functional

from fathoms.ops.add_norm import add_norm
from fathoms.ops.triton import add_norm as kernels
from fathoms.ops.triton.add_norm import Tile
from fathoms.parts import NORMS, RESIDUALS

MAIN = (256 * 197, 384)
OTHERS = [(256 * 197, 192), (256 * 197, 768), (64 * 577, 384), (256 * 196, 384)]
SCALES = {"none": "none", "channel": "layerscale", "scalar": "rezero"}
CALLS, TURNS = 10, 9
# What a norm's parameters are called where they do what these do.
NAMES = {"weight": ("weight", "g", "a"), "bias": ("bias", "b"), "alpha": ("alpha",), "shift": ("shift",)}

# Cuts to try, by the padded channels a program holds; the last number counts for the backward pass only.
TRIED = {
    64: ((8, 2, 1, 8), (16, 4, 1, 4), (32, 4, 1, 3), (16, 4, 2, 4), (32, 8, 1, 2), (8, 2, 1, 5)),
    256: (
        (1, 1, 1, 20),
        (2, 1, 1, 12),
        (2, 2, 1, 10),
        (4, 2, 1, 6),
        (4, 4, 1, 5),
        (2, 1, 2, 12),
        (4, 4, 2, 5),
    ),
    512: ((1, 1, 1, 12), (1, 2, 1, 10), (2, 2, 1, 6), (4, 4, 1, 3), (2, 4, 1, 5), (2, 2, 2, 6), (4, 4, 2, 3)),
    1024: ((1, 1, 1, 8), (1, 2, 1, 6), (1, 4, 1, 5), (2, 4, 1, 3), (1, 4, 2, 5), (2, 4, 2, 3), (2, 8, 1, 2)),
}


class Row(NamedTuple):
    """One join: tokens and channels, norm ("bare" is a LayerNorm without weight and bias), scale."""

    size: tuple[int, int]
    norm: str
    scale: str


FIRST = [
    Row(MAIN, "layernorm", "channel"),
    Row(MAIN, "learnable_scaler", "channel"),
    Row(MAIN, "bare", "none"),
]
ROWS = [
    *FIRST,
    *(Row(size, norm, "channel") for size in OTHERS[:2] for norm in ("layernorm", "learnable_scaler")),
    Row(MAIN, "layernorm", "none"),
    Row(MAIN, "layernorm", "scalar"),
    *(Row(MAIN, norm, "channel") for norm in ("rmsnorm", "dyt", "scalenorm", "derf", "none")),
    Row(OTHERS[2], "layernorm", "channel"),
    Row(OTHERS[0], "layernorm", "none"),
    Row(OTHERS[1], "layernorm", "none"),
    Row(OTHERS[3], "layernorm", "channel"),
    *(Row(MAIN, norm, scale) for norm in ("learnable_scaler", "rmsnorm") for scale in ("none", "scalar")),
    Row(OTHERS[2], "learnable_scaler", "channel"),
    Row(OTHERS[3], "learnable_scaler", "channel"),
    *(
        Row(MAIN, norm, scale)
        for norm in ("dyt", "scalenorm", "derf", "none")
        for scale in ("none", "scalar")
    ),
]


def main() -> None:
    """Measure the rows in order; the last line of the output is one JSON object with `--json`."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--first", action="store_true", help="only the first three rows")
    parser.add_argument("--tiles", action="store_true", help="try cuts of the kernels first")
    parser.add_argument("--seconds", type=float, default=75.0, help="begin no row after this time")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md, after every row")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; run this where there is one")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report |= {"tiles": {}, "rows": [], "left_out": []}
    if arguments.tiles:
        for width in (384, 192, 768):
            report["tiles"] |= try_tiles((MAIN[0], width), "layernorm")
        report["tiles"] |= try_tiles(MAIN, "learnable_scaler")
        print(f"cuts tried by {time.monotonic() - began:.0f} s", flush=True)
    for row in FIRST if arguments.first else ROWS:
        if time.monotonic() - began > arguments.seconds:
            report["left_out"].append(row)
            continue
        report["rows"].append(measure(row))
        print(f"{as_line(report['rows'][-1])}  {time.monotonic() - began:.0f} s", flush=True)
        if arguments.output is not None:
            arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            arguments.output.with_suffix(".md").write_text(as_table(report))
    if report["left_out"]:
        print(f"left out, for want of time: {report['left_out']}")
    if arguments.json:
        print(json.dumps(report))


class Join(nn.Module):
    """What two blocks do at their seam, with the library's own parts."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        dim = row.size[1]
        self.scale = RESIDUALS.build(SCALES[row.scale], dim)
        self.norm = None if row.norm == "bare" else NORMS.build(row.norm, dim)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Stream and normed stream."""
        stream = x + self.scale(branch)
        if self.norm is None:
            return stream, functional.layer_norm(stream.float(), stream.shape[-1:], eps=1e-6).to(stream.dtype)
        return stream, self.norm(stream)


def fused(join: Join, row: Row) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same through the fused op."""
    own = {
        ours: next((getattr(join.norm, name) for name in names if hasattr(join.norm, name)), None)
        for ours, names in NAMES.items()
    }
    scale: Any = getattr(join.scale, "gamma", getattr(join.scale, "alpha", None))
    kind: Any = "layernorm" if row.norm == "bare" else row.norm
    eps = getattr(join.norm, "eps", 1e-6)
    return lambda x, branch: add_norm(x, branch, scale, kind=kind, eps=eps, impl="triton", **own)


def measure(row: Row) -> dict[str, Any]:
    """Every form of one join."""
    torch.compiler.reset()
    join, leaves, grads = make_inputs(row)
    forms: dict[str, Callable[..., Any]] = {"eager": join, "compiled": torch.compile(join, dynamic=False)}
    if row.norm != "none":
        forms["fused"] = fused(join, row)
    learned = [*leaves, *join.parameters()]
    graphs: dict[Any, Replay] = {}
    peaks = {}
    for name, form in forms.items():
        graphs[name, "forward_ms"] = capture(lambda form=form: form(*leaves))
        graphs[name, "training_ms"] = capture(lambda form=form: train(form, leaves, learned, grads))
        peaks[name] = peak_mib(lambda form=form: train(form, leaves, learned, grads))
    graphs["copies", "ms"] = capture_copies(row.size)
    times = in_turns(graphs)
    result: dict[str, Any] = {**row._asdict(), "copy_ms": times["copies", "ms"]}
    # NoNorm writes nothing of its own, and its backward pass adds the two gradients it is given.
    forward, backward = (3, 3) if row.norm == "none" else (4, 4)
    backward += 0 if row.scale == "none" else 2
    # A copy moves two tensors.
    result["floor"] = {
        "forward_ms": forward / 2 * result["copy_ms"],
        "training_ms": (forward + backward) / 2 * result["copy_ms"],
    }
    for name in forms:
        result[name] = {key: times[name, key] for key in ("forward_ms", "training_ms")}
        result[name]["peak_mib"] = peaks[name]
    if row.norm != "none":
        result["speedup"] = result["compiled"]["training_ms"] / result["fused"]["training_ms"]
        result["worst_error"] = worst_error(row)
    result["kernels"] = (
        kernel_times(lambda: train(forms["compiled"], leaves, learned, grads)) if row in FIRST else {}
    )
    return result


def make_inputs(row: Row, tokens: int | None = None) -> tuple[Join, list[Tensor], list[Tensor]]:
    """The join, its stream and branch, and gradients of both outputs."""
    torch.manual_seed(0)
    shape = (tokens or row.size[0], row.size[1])
    join = Join(row).cuda()
    x, branch, *grads = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return join, [x.requires_grad_(), branch.requires_grad_()], grads


def train(
    form: Callable[..., Any], leaves: list[Tensor], learned: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """One forward and backward pass."""
    return torch.autograd.grad(form(*leaves), learned, grads)


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
    """Copies among ten tensors, about as many as a join touches: the cache helps them as much as it helps the join."""
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


def peak_mib(work: Callable[[], object]) -> float:
    """Memory that one call takes on top of its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def worst_error(row: Row) -> float:
    """The largest of the fused form's errors against float64 over that of the eager form, on 1,031 tokens."""
    join, leaves, grads = make_inputs(row, 1031)

    def outcome(form: Callable[..., Any], given: list[Tensor], own: Join, dtype: torch.dtype) -> list[Tensor]:
        out = form(*given)
        learned = [*given, *own.parameters()]
        return [*out, *torch.autograd.grad(out, learned, [grad.to(dtype) for grad in grads])]

    ours = outcome(fused(join, row), leaves, join, torch.bfloat16)
    theirs = outcome(join, leaves, join, torch.bfloat16)
    exact_join = make_inputs(row, 1)[0].double()
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = outcome(exact_join, doubles, exact_join, torch.float64)
    # A sum over tokens that is rounded only once, at its end, may by luck have almost no error.
    errors = [
        [max(((value.double() - truth).norm() / truth.norm()).item(), 1e-4) for value in (own, other)]
        for own, other, truth in zip(ours, theirs, exact, strict=True)
    ]
    return max(own / other for own, other in errors)


def kernel_times(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if "CUDA" in str(event.device_type)]
    return {f"{place} {event.name[:80]}": event.device_time for place, event in enumerate(events)}


def try_tiles(size: tuple[int, int], norm: str) -> dict[str, Any]:
    """Time the kernels with every cut, and leave the best ones in place."""
    row = Row(size, norm, "channel")
    join, leaves, grads = make_inputs(row)
    form, learned = fused(join, row), [*leaves, *join.parameters()]
    columns = kernels._columns(size[1], norm)
    graphs: dict[Any, Replay] = {}
    for cut in TRIED[columns]:
        kernels.FORWARD[columns] = Tile(*cut)
        graphs["forward", cut] = capture(lambda: form(*leaves))
    for cut in TRIED[columns]:
        kernels.BACKWARD[columns] = Tile(*cut)
        graphs["training", cut] = capture(lambda: train(form, leaves, learned, grads))
    times = in_turns(graphs)
    for tiles, key in ((kernels.FORWARD, "forward"), (kernels.BACKWARD, "training")):
        tiles[columns] = Tile(*min(TRIED[columns], key=lambda cut, key=key: times[key, cut]))
    told = {f"{key} {cut}": round(value, 4) for (key, cut), value in times.items()}
    print(
        columns, json.dumps(told), "taken:", kernels.FORWARD[columns], kernels.BACKWARD[columns], flush=True
    )
    return {str(columns): told}


def as_line(row: dict[str, Any]) -> str:
    """One join for a reader."""
    cells = [f"{row['size']!s:13} {row['norm']:16} {row['scale']:7}"]
    forms = [name for name in ("eager", "compiled", "fused", "floor") if name in row]
    cells += [f"{name} {row[name]['forward_ms']:.4f}/{row[name]['training_ms']:.4f}" for name in forms]
    if "fused" in row:
        cells.append(f"speedup {row['speedup']:.3f}, error {row['worst_error']:.2f} of eager")
    return "  ".join(cells)


def as_table(report: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{report['device']}, torch {report['torch']}; forward / forward and backward, milliseconds.\n",
        "| tokens, channels | norm | scale | eager | torch.compile | fused | floor | speed | MiB compiled, fused |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cells = [f"{row['size'][0]:,}, {row['size'][1]}", row["norm"], row["scale"]]
        for name in ("eager", "compiled", "fused", "floor"):
            form = row.get(name)
            cells.append(f"{form['forward_ms']:.3f} / {form['training_ms']:.3f}" if form else "")
        cells.append(f"{row['speedup']:.2f}×" if "speedup" in row else "")
        cells.append(
            ", ".join(f"{row[name]['peak_mib']:.0f}" for name in ("compiled", "fused") if name in row)
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
