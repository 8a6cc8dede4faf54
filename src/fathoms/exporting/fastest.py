"""The quickest verified file: every way to run a model on this machine's CPU, compared on real images and timed."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.errors import FathomsError
from fathoms.evaluating.onnx_model import RUNTIMES
from fathoms.exporting.int8 import Judge
from fathoms.exporting.verified_export import FORMATS, Exported, export_model, files_of
from fathoms.files import check_absent, replacing
from fathoms.parts.modes import in_inference
from fathoms.surgery.inputs import example_images, image_shape
from fathoms.text_table import aligned

Run = Callable[[Tensor], Any]
BATCHES = (1, 8)
TURNS, SECONDS = 5, 0.2
"""Turns of each timing, of which the median counts, and the least length of a turn."""


@dataclass(frozen=True)
class Candidate:
    """A way to run a model.

    Args:
        name: Its name in tables.
        format: The format of its file.
        int8: "dynamic", "static" (which needs images for calibration) or "" for float32.
    """

    name: str
    format: str
    int8: str = ""


CANDIDATES = (
    Candidate("onnxruntime", "onnx"),
    Candidate("onnxruntime int8 dynamic", "onnx", "dynamic"),
    Candidate("onnxruntime int8 static", "onnx", "static"),
    Candidate("OpenVINO", "openvino"),
    Candidate("OpenVINO int8 static", "openvino", "static"),
    Candidate("torch.export", "torch-export"),
)


@dataclass(frozen=True)
class Tried:
    """One candidate, measured.

    Args:
        name: Of the candidate; "model" is the model as it is.
        folded: Whether its scales were folded first.
        problem: Why there is no file; "" if there is one.
        ms: Milliseconds of a batch, by "BATCH x THREADS".
        times: How many times as quick as the model, the geometric mean over `ms`.
        difference: Largest difference from the model's logits over its largest logit, on the images.
        agreement: Share of the images with the model's top-1, in percent.
        drop: Loss of top-1 accuracy, in percentage points.
        bytes: Size of its files.
    """

    name: str
    folded: bool = False
    problem: str = ""
    ms: Mapping[str, float] | None = None
    times: float = 1.0
    difference: float = 0.0
    agreement: float = 100.0
    drop: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Fastest:
    """Every candidate, and the export of the quickest."""

    tried: tuple[Tried, ...]
    exported: Exported

    def to_json(self) -> dict[str, Any]:
        return {**self.exported.to_json(), "tried": [asdict(row) for row in self.tried]}


def export_fastest(
    model: nn.Module, stem: Path, judge: Judge, overwrite: bool = False, **options: Any
) -> Fastest:
    """Write the quickest file whose loss of accuracy is within `judge.max_drop`; one slower than the model is refused.

    Args:
        model: The model.
        stem: The file without its ending.
        judge: Images with labels, and those for calibration.
        overwrite: Replace files that are there.
        **options: Of `export_model`: accelerated, opset, name, about.
    """
    with in_inference(model), tempfile.TemporaryDirectory(dir=stem.parent, prefix=".fastest.") as folder:
        tried, files = measure(model, Path(folder), stem.name, judge, **options)
        able = [row for row in tried if row.name in files and row.drop <= judge.max_drop]
        best = max(able, key=lambda row: row.times, default=None)
        if best is None or best.times < 1:
            quickest = (
                "no file could be written"
                if best is None
                else f"{best.name} is {best.times:.2f} times as quick"
            )
            raise FathomsError(
                f"--fastest: no file is quicker than the model itself ({quickest}); nothing was written, name a "
                "--format to have one all the same\n" + table(tried)
            )
        exported = files[best.name]
        own = files_of(Path(exported.path), exported.format)
        targets = {file: stem.parent / file.name for file in own if file.is_file()}
        check_absent(targets.values(), overwrite)
        for file, target in targets.items():
            with replacing(target) as temporary:
                file.replace(temporary)
    moved: dict[str, Any] = {
        name: str(stem.parent / Path(getattr(exported, name)).name) for name in ("path", "card")
    }
    return Fastest(tuple(tried), replace(exported, **moved))


def measure(
    model: nn.Module,
    folder: Path,
    stem: str,
    judge: Judge,
    *,
    folds: Sequence[bool] = (False, True),
    beside: Callable[[int], Mapping[str, Run]] = lambda _: {},
    **options: Any,
) -> tuple[list[Tried], dict[str, Exported]]:
    """Write every candidate into a folder of its own, and measure those that are right: rows, and exports by name.

    Args:
        model: The model.
        folder: An empty folder.
        stem: Name of the files without their ending.
        judge: Images with labels, and those for calibration.
        folds: Whether scales are folded first; each is tried.
        beside: More runners for a number of threads, which are timed only.
        **options: Of `export_model`.
    """
    channels = image_shape(model)[0]
    rows, files = [Tried("model")], dict[str, Exported]()
    logits, labels = outputs(model, judge, channels)
    for candidate, folded in itertools.product(CANDIDATES, folds):
        name = f"{candidate.name}, folded" if folded else candidate.name
        place = folder / str(len(rows))
        place.mkdir()
        try:
            made = _write(model, place / stem, candidate, folded, judge, options)
        except FathomsError as error:
            problem = str(error).removeprefix("export: ").partition("; nothing was written")[0]
            rows.append(Tried(name, folded, problem=problem))
            continue
        path = Path(made.path)
        found, _ = outputs(opened(path, torch.get_num_threads()), judge, channels)
        size = sum(file.stat().st_size for file in files_of(path, made.format)[:-2])
        rows.append(Tried(name, folded, **compared(logits, found, labels, judge), bytes=size))
        files[name] = made

    def runners(threads: int) -> Mapping[str, Run]:
        own = {name: opened(Path(made.path), threads) for name, made in files.items()}
        return {"model": model, **own, **beside(threads)}

    timed = race(runners, {batch: example_images(model, batch) for batch in BATCHES})
    rows += [Tried(name) for name in timed if name not in {row.name for row in rows}]
    source = timed["model"]
    return [
        replace(row, ms=timed[row.name], times=ratio(source, timed[row.name])) if row.name in timed else row
        for row in rows
    ], files


def _write(
    model: nn.Module, path: Path, candidate: Candidate, folded: bool, judge: Judge, options: dict[str, Any]
) -> Exported:
    if candidate.int8 == "static" and judge.calibration is None:
        raise FathomsError("int8 with fixed ranges needs images; give --calibrate DATA")
    own = judge if candidate.int8 == "static" else replace(judge, calibration=None)
    if candidate.format == "torch-export":
        options = {**options, "opset": None}
    return export_model(
        model,
        path.with_name(path.name + FORMATS[candidate.format]),
        candidate.format,
        folded=folded,
        int8=own if candidate.int8 else None,
        graph=path.parent.parent / f"{'folded' if folded else 'plain'}.onnx",
        **options,
    )


def opened(path: Path, threads: int) -> Any:
    """An exported file of this process as a model."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    return RUNTIMES[path.suffix](path, threads)


@torch.no_grad()
def outputs(model: Any, judge: Judge, channels: int) -> tuple[Tensor, Tensor]:
    """Logits of all images and their labels, without images that could not be read."""
    rows = []
    for batch in judge.batches():
        read = batch.labels >= 0
        rows.append((model(batch.images[read, :channels]).float(), batch.labels[read]))
    logits, labels = zip(*rows, strict=True)
    return torch.cat(logits), torch.cat(labels)


def compared(own: Tensor, other: Tensor, labels: Tensor, judge: Judge) -> dict[str, Any]:
    """Largest difference, agreement of top-1, and loss of accuracy of other logits for the same images."""

    def right(logits: Tensor) -> float:
        known = logits if judge.label_map is None else logits[:, judge.label_map]
        return 100 * float((known.argmax(1) == labels).float().mean())

    return {
        "difference": float((own - other).abs().max() / own.abs().max()),
        "agreement": 100 * float((own.argmax(1) == other.argmax(1)).float().mean()),
        "drop": right(own) - right(other),
    }


@torch.no_grad()
def race(
    make: Callable[[int], Mapping[str, Run]], images: Mapping[int, Tensor]
) -> dict[str, dict[str, float]]:
    """Milliseconds of each runner at each batch, with one and with all threads; runners take turns.

    Args:
        make: The runners by name, for a number of threads.
        images: A batch of each size.
    """
    found: dict[str, dict[str, float]] = {}
    for threads in sorted({1, torch.get_num_threads()}):
        with torch_threads(threads):
            runners = make(threads)
            for batch, given in images.items():
                for name, ms in _turns(runners, given).items():
                    found.setdefault(name, {})[f"{batch} x {threads}"] = ms
    return found


def _turns(runners: Mapping[str, Run], images: Tensor) -> dict[str, float]:
    repeats, times = dict[str, int](), {name: list[float]() for name in runners}
    for name, run in runners.items():
        run(images)
        repeats[name] = max(1, round(SECONDS / max(_seconds(run, images, 1), 1e-6)))
    for _ in range(TURNS):
        for name, run in runners.items():
            times[name].append(1e3 * _seconds(run, images, repeats[name]))
    return {name: statistics.median(own) for name, own in times.items()}


def _seconds(run: Run, images: Tensor, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        run(images)
    return (time.perf_counter() - began) / repeats


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Run torch on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ratio(source: Mapping[str, float], other: Mapping[str, float]) -> float:
    """How many times as quick as the source, the geometric mean over batches and threads."""
    return math.exp(statistics.fmean(math.log(source[key] / other[key]) for key in source))


def table(rows: Sequence[Tried]) -> str:
    """A line for each candidate; those without a file say why."""
    keys = list(next((row.ms for row in rows if row.ms), {}))
    head = ("", *(f"{key}: ms" for key in keys), "times", "agreement", "top1 lost", "difference", "MB")
    lines = [
        (
            row.name,
            *(f"{row.ms[key]:.3g}" for key in keys),
            f"{row.times:.2f}",
            f"{row.agreement:.1f} %",
            f"{row.drop:.2f}",
            f"{row.difference:.2g}",
            f"{row.bytes / 1e6:.3g}" if row.bytes else "",
        )
        for row in rows
        if row.ms
    ]
    missing = [f"{row.name}: {row.problem}" for row in rows if row.problem]
    note = f"batch x threads; times: as quick as the model on this machine, over {len(keys)} timings"
    return "\n".join([aligned(head, lines), note, *missing])
