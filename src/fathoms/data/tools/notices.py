"""Notices about a data set before training on it, one line each; nothing here refuses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8

from fathoms.data.decode.decode import choose_decoder
from fathoms.data.errors import DataError
from fathoms.data.sources.arrays import ArraySource
from fathoms.data.sources.base import Source
from fathoms.data.sources.left_out import left_out_of

AnySource = Source | ArraySource
Size = tuple[int, int]

# The built-in digits have 8 x 8 pixels; below that there is hardly a shape to recognise.
TINY = 8
# Files of a split whose headers are read before training; `fathoms data check` reads all of them.
_LOOKED_AT = 32


def notices(sources: Sequence[AnySource]) -> list[str]:
    """Lines about the splits of a data set, the training split first; a few files of each are looked at."""
    train, *held_out = sources
    left = left_out_of(*sources).describe()
    sizes = {source.split: _sizes(source) for source in sources}
    lines = [left] if left else []
    lines += one_class(train.classes) + of_sizes(sizes) + of_colours(sources)
    lines += [
        f"warning: {source.split} holds the same images as {train.split}; "
        "its accuracy says nothing about new images"
        for source in held_out
        if _same(train, source)
    ]
    return lines


def one_class(classes: Sequence[str]) -> list[str]:
    """A line if there is nothing to tell apart."""
    if len(classes) > 1:
        return []
    return [f"warning: there is one class, {classes[0]!r}; a classifier needs two"]


def of_sizes(sizes: Mapping[str, Counter[Size]]) -> list[str]:
    """Lines about images that are tiny, or of another size in another split.

    Args:
        sizes: How many images of a split have each height and width.
    """
    lines = []
    for split, counted in sizes.items():
        tiny = {size: count for size, count in counted.items() if min(size) < TINY}
        if tiny:
            height, width = min(tiny)
            lines.append(
                f"warning: {sum(tiny.values())} of {counted.total()} {split} images looked at have a side of fewer "
                f"than {TINY} pixels ({height}x{width}); they hold little to learn from"
            )
    # Photographs come in all sizes; only sizes that a whole split shares can contradict another's.
    single = {split: next(iter(counted)) for split, counted in sizes.items() if len(counted) == 1}
    if len(set(single.values())) > 1:
        listed = ", ".join(f"{split} {height}x{width}" for split, (height, width) in single.items())
        lines.append(
            f"warning: splits have images of different sizes ({listed}); all are resized to the model's"
        )
    return lines


def of_colours(sources: Sequence[AnySource]) -> list[str]:
    """A line about arrays of which some splits are grey and others are in colour.

    Both are taken, since a model of one channel sees them alike; to one of three channels they are different data.
    """
    arrays = [source for source in sources if isinstance(source, ArraySource)]
    colours = {s.split: "grey" if _is_grey(s.images[_picked(len(s))]) else "RGB" for s in arrays}
    if len(set(colours.values())) < 2 or not all(
        _is_grey(s.images) for s in arrays if colours[s.split] == "grey"
    ):
        return []
    listed = ", ".join(f"{split} {colour}" for split, colour in colours.items())
    return [
        f"warning: some splits are grey and others in colour ({listed}); grey becomes three equal channels"
    ]


def _is_grey(images: UInt8[np.ndarray, "N H W 3"]) -> bool:
    return np.array_equal(images[..., 0], images[..., 1]) and np.array_equal(images[..., 1], images[..., 2])


def overlaps(digests: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines about splits that hold images of the first one, by the hashes of their images."""
    first, *others = digests
    known = set(digests[first])
    lines = []
    for split in others:
        both = sum(digest in known for digest in digests[split])
        if both:
            lines.append(f"warning: {both} of {len(digests[split])} {split} images are also in {first}")
    return lines


def _picked(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, _LOOKED_AT).astype(int)).tolist()


def _sizes(source: AnySource) -> Counter[Size]:
    if isinstance(source, ArraySource):
        return Counter({source.images.shape[1:3]: len(source)})
    decoder, found = choose_decoder("auto"), Counter[Size]()
    for index in _picked(len(source)):
        try:
            found[decoder.header(source.read(index)).shown] += 1
        # A file that cannot be read is reported by whoever needs it.
        except (DataError, OSError):
            continue
    return found


def _same(one: AnySource, other: AnySource) -> bool:
    """Whether two splits are copies: the same labels in the same order, and the same images where looked at."""
    if not np.array_equal(one.labels, other.labels):
        return False
    if isinstance(one, ArraySource):
        return isinstance(other, ArraySource) and np.array_equal(one.images, other.images)
    if isinstance(other, ArraySource):
        return False
    try:
        return all(one.read(index) == other.read(index) for index in _picked(len(one)))
    except (DataError, OSError):
        return False
