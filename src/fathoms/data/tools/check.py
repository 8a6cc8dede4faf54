"""Check a data set: decode every image, find bad ones and duplicates."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fathoms.data.decode.decode import Decoder, choose_decoder
from fathoms.data.errors import BadImageError, DataError
from fathoms.data.sources.arrays import ArraySource
from fathoms.data.sources.base import Source
from fathoms.data.tools.duplicates import (
    CROWD,
    NEAR,
    exact_groups,
    first_of_each,
    near_pairs,
    perceptual_hash,
)
from fathoms.data.tools.manifest import FileRow
from fathoms.data.tools.ordered_map import ordered_map
from fathoms.text_table import plural


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
        """Files that cannot be used."""
        return [file for file in self.files if file.problem]

    def modes(self) -> dict[str, int]:
        """The number of images of each kind ("JPEG RGB", "PNG RGBA", …)."""
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
    """Decode every image of every source; find duplicates within and across splits.

    Args:
        sources: The splits.
        workers: Decoding threads.
        near: Bits by which two perceptual hashes may differ; -1 skips near duplicates.
        progress: Called with the number of images done.
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
    names = [file.row.name for file in good]
    splits = [file.split for file in good]
    groups = exact_groups([file.row.sha256 for file in good])
    report.exact = [[names[i] for i in group] for group in groups]
    report.across = [[names[i] for i in group] for group in groups if len({splits[i] for i in group}) > 1]
    if near < 0:
        return
    # Copies within a split are listed above.
    own = [good[i] for i in first_of_each([(file.row.sha256, file.split) for file in good], 1)]
    hashed = [file for file in own if file.hash is not None]
    kept = [hashed[i] for i in first_of_each([(file.hash, file.split) for file in hashed], CROWD)]
    report.crowded = len(hashed) - len(kept)
    for i, j, distance in near_pairs([file.hash for file in kept], near):
        one, other = kept[i], kept[j]
        if one.row.sha256 == other.row.sha256:
            continue
        report.near.append((one.row.name, other.row.name, distance))
        if one.split != other.split:
            report.across.append([one.row.name, other.row.name])
