"""Duplicate images: exact by sha256, near ones by a 64-bit perceptual hash."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from jaxtyping import UInt8, UInt64

from fathoms.data.crop.resize import resize

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
    places: dict[int, list[int]] = defaultdict(list)
    for place, value in enumerate(hashes):
        if value is not None:
            places[value].append(place)
    found = [(i, j, 0) for group in places.values() for i, j in itertools.combinations(group, 2)]
    groups = list(places.values())
    for (one, other), bits in _near_values(np.array(list(places), np.uint64), limit).items():
        pairs = itertools.product(groups[one], groups[other])
        found += [(min(pair), max(pair), bits) for pair in pairs]
    return sorted(found)


def _near_values(values: UInt64[np.ndarray, "n"], limit: int) -> dict[tuple[int, int], int]:
    """The distance of every two different hashes within `limit` bits, by their places."""
    bands = limit + 1
    edges = [round(64 * band / bands) for band in range(bands + 1)]
    pairs: dict[tuple[int, int], int] = {}
    for low, high in itertools.pairwise(edges):
        part = (values >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(part, kind="stable")
        cuts = np.flatnonzero(np.diff(part[order])) + 1
        for group in np.split(order, cuts):
            # A stable sort: places rise within a group.
            for at, first in enumerate(group[:-1]):
                others = group[at + 1 :]
                distance = _bit_count(values[others] ^ values[first])
                for other, bits in zip(others[distance <= limit], distance[distance <= limit], strict=True):
                    pairs[int(first), int(other)] = int(bits)
    return pairs


def first_of_each(keys: Sequence[Hashable], most: int) -> list[int]:
    """Places of the first `most` of each key.

    >>> first_of_each("abaab", 2)
    [0, 1, 2, 4]
    """
    seen: Counter[Hashable] = Counter()
    kept = []
    for place, key in enumerate(keys):
        seen[key] += 1
        if seen[key] <= most:
            kept.append(place)
    return kept


def _bit_count(values: np.ndarray) -> np.ndarray:
    return np.unpackbits(values.view(np.uint8).reshape(-1, 8), axis=1).sum(1)


def exact_groups(digests: list[str]) -> list[list[int]]:
    """Groups of two or more indices with the same digest."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, digest in enumerate(digests):
        places[digest].append(place)
    return [group for group in places.values() if len(group) > 1]
