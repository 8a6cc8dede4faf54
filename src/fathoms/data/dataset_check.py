"""Check a data set: decode every image, find bad ones, and duplicates.

Duplicates are exact by sha256, or near by a 64-bit perceptual hash.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import UInt8

from fathoms.data.images.decode import Decoder, choose_decoder
from fathoms.data.images.pixels import resize
from fathoms.data.readiness import FileRow
from fathoms.data.sources.arrays import ArraySource
from fathoms.data.sources.source import BadImageError, DataError, Source
from fathoms.text_table import plural

In = TypeVar("In")
Out = TypeVar("Out")

# Enough to keep the threads busy, few enough that memory stays bounded.
WINDOW = 128


def ordered_map(pool: Executor, work: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    left = iter(items)
    waiting = deque(pool.submit(work, item) for item in islice(left, WINDOW))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(pool.submit(work, item) for item in islice(left, 1))


# Hashes of unrelated photos differ in about 32 of 64 bits; re-encoding or shrinking flips a few.
NEAR = 4
# Files of one split and one hash that are compared; ten thousand alike would be 50 million pairs.
CROWD = 50
# An image whose 32 x 32 luma varies less than this (in levels) is blank: its hash is noise.
FLAT = 4.0


@functools.cache
def _cosines() -> np.ndarray:
    """Rows 0 to 8 of the 32-point cosine transform."""
    k, n = np.arange(9)[:, None], np.arange(32)[None]
    return np.cos(np.pi * k * (2 * n + 1) / 64)


def perceptual_hash(pixels: UInt8[np.ndarray, "h w 3"]) -> int | None:
    """64 bits: whether each of the 64 lowest frequencies of the luma is above their median; None for a blank image.

    The mean, frequency zero, is left out, so brightness does not matter.
    """
    small = resize(pixels, 32, 32, cubic=False).to(torch.float32).numpy()
    luma = 0.299 * small[0] + 0.587 * small[1] + 0.114 * small[2]
    if luma.std() < FLAT:
        return None
    spectrum = (_cosines() @ luma @ _cosines().T).ravel()[1:65]
    bits = spectrum > np.median(spectrum)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def near_pairs(hashes: Sequence[int | None], limit: int = NEAR) -> list[tuple[int, int, int]]:
    """(i, j, distance) with i < j for every pair within `limit` bits.

    Two hashes within four bits agree in at least one of five bands, so only hashes that share a band
    are compared: a million take seconds, not days.

    >>> near_pairs([0, 1, 1])
    [(0, 1, 1), (0, 2, 1), (1, 2, 0)]
    """
    places = np.array([place for place, value in enumerate(hashes) if value is not None], np.int64)
    values = np.array([value for value in hashes if value is not None], np.uint64)
    edges = [round(64 * band / (limit + 1)) for band in range(limit + 2)]
    pairs: dict[tuple[int, int], int] = {}
    for low, high in itertools.pairwise(edges):
        part = (values >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(part, kind="stable")
        cuts = np.flatnonzero(np.diff(part[order])) + 1
        for group in np.split(order, cuts):
            # A stable sort: places rise within a group.
            for at, first in enumerate(group[:-1]):
                others = group[at + 1 :]
                differing = (values[others] ^ values[first]).view(np.uint8).reshape(-1, 8)
                distance = np.unpackbits(differing, axis=1).sum(1)
                for other, bits in zip(others[distance <= limit], distance[distance <= limit], strict=True):
                    pairs[int(places[first]), int(places[other])] = int(bits)
    return sorted((one, other, bits) for (one, other), bits in pairs.items())


def _grouped(files: Iterable[CheckedFile], key: Callable[[CheckedFile], Hashable]) -> list[list[CheckedFile]]:
    groups: dict[Hashable, list[CheckedFile]] = defaultdict(list)
    for file in files:
        groups[key(file)].append(file)
    return list(groups.values())


@dataclass(frozen=True)
class CheckedFile:
    """Result of checking one image, a file or a row of an array."""

    split: str
    row: FileRow
    problem: str = ""
    mode: str = ""
    shape: tuple[int, int] = (0, 0)
    hash: int | None = None
    rotated: bool = False


@dataclass
class Report:
    """Result of a check: every file, and duplicates among them."""

    files: list[CheckedFile] = field(default_factory=list)
    exact: list[list[str]] = field(default_factory=list)
    near: list[tuple[str, str, int]] = field(default_factory=list)
    across: list[list[str]] = field(default_factory=list)
    crowded: int = 0
    """Files that were not compared for near duplicates, as too many others of their split have their hash."""
    decoder: str = ""

    @property
    def bad(self) -> list[CheckedFile]:
        return [file for file in self.files if file.problem]

    def modes(self) -> dict[str, int]:
        return dict(Counter(f.mode for f in self.files if f.mode).most_common())

    def notices(self) -> list[str]:
        """A line if a crowd was not compared in full."""
        if not self.crowded:
            return []
        return [
            f"warning: {plural(self.crowded, 'file')} not compared for near duplicates; "
            f"{CROWD} before them in their split have the same hash"
        ]

    def balance(self, classes: tuple[str, ...], split: str) -> dict[str, int]:
        """Good images per class."""
        count = Counter(f.row.label for f in self.files if f.split == split and not f.problem)
        return {name: count.get(number, 0) for number, name in enumerate(classes)}


def inspect_file(source: Source, decoder: Decoder, index: int) -> CheckedFile:
    """Read and decode one file entirely."""
    name, label = source.where(index), int(source.labels[index])
    try:
        data = source.read(index)
    except (OSError, DataError) as error:
        row = FileRow(name, 0, label, "")
        return CheckedFile(source.split, row, f"cannot be read ({error})")
    row = FileRow(name, len(data), label, hashlib.sha256(data).hexdigest())
    try:
        header = decoder.header(data)
        pixels = decoder.decode(data, header=header)
    except BadImageError as error:
        return CheckedFile(source.split, row, str(error))
    mode = f"{header.format} {header.mode}"
    return CheckedFile(
        source.split, row, "", mode, header.shown, perceptual_hash(pixels), rotated=header.orientation != 1
    )


def inspect_array(source: ArraySource, index: int) -> CheckedFile:
    """Look at one image of an array, which needs no decoding."""
    pixels = source.images[index]
    digest = hashlib.sha256(pixels.tobytes()).hexdigest()
    row = FileRow(source.where(index), pixels.nbytes, int(source.labels[index]), digest)
    height, width, _ = pixels.shape
    return CheckedFile(source.split, row, shape=(height, width), hash=perceptual_hash(pixels))


def check_sources(
    sources: Sequence[Source | ArraySource],
    workers: int = 1,
    near: int = NEAR,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Decode every image of every source with `workers` threads; find duplicates within and across splits.

    Two images are near duplicates if their perceptual hashes differ in at most `near` bits; -1 skips the search.
    """
    decoder = choose_decoder("auto")
    arrays = all(isinstance(source, ArraySource) for source in sources)
    report = Report(decoder="none (arrays)" if arrays else f"{decoder.name} ({decoder.reason})")
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for source in sources:
            if isinstance(source, ArraySource):
                inspect = functools.partial(inspect_array, source)
            else:
                inspect = functools.partial(inspect_file, source, decoder)
            for file in ordered_map(pool, inspect, range(len(source))):
                report.files.append(file)
                progress(len(report.files))
    _find_duplicates(report, near)
    return report


def _find_duplicates(report: Report, near: int) -> None:
    good = [file for file in report.files if not file.problem]
    copies = [group for group in _grouped(good, lambda file: file.row.sha256) if len(group) > 1]
    report.exact = [[file.row.name for file in group] for group in copies]
    report.across = [
        [file.row.name for file in group] for group in copies if len({file.split for file in group}) > 1
    ]
    if near < 0:
        return
    # Copies within a split are listed above.
    own = [group[0] for group in _grouped(good, lambda file: (file.row.sha256, file.split))]
    crowds = _grouped((f for f in own if f.hash is not None), lambda file: (file.hash, file.split))
    report.crowded = sum(max(0, len(crowd) - CROWD) for crowd in crowds)
    kept = [file for crowd in crowds for file in crowd[:CROWD]]
    for i, j, distance in near_pairs([file.hash for file in kept], near):
        one, other = kept[i], kept[j]
        if one.row.sha256 == other.row.sha256:
            continue
        report.near.append((one.row.name, other.row.name, distance))
        if one.split != other.split:
            report.across.append([one.row.name, other.row.name])
