"""Bytes and headers of samples, and which sample stands in for a bad one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fathoms.data.counter_rng import sample_keys, uniforms
from fathoms.data.decode.decode import Decoder
from fathoms.data.decode.image_header import ImageHeader
from fathoms.data.errors import BadImageError, DataError
from fathoms.data.sampler import Refs
from fathoms.data.sources.base import Source

# A slot gives up after this many bad candidates in a row; the allowed share is exceeded long before.
_CANDIDATES = 32


class Opened(NamedTuple):
    """A picture that was read but not decoded."""

    index: int
    name: str
    data: bytes
    header: ImageHeader


@dataclass(frozen=True)
class Reader:
    """Where bytes come from and how they are decoded; `begin` and `bad` report to the loader."""

    source: Source
    decoder: Decoder
    begin: Callable[[str], None]
    bad: Callable[[str, str], None]

    def open(self, index: int) -> Opened:
        """Bytes and header of one picture; raises `BadImageError`."""
        name = self.source.where(index)
        self.begin(name)
        try:
            data = self.source.read(index)
        # A file that vanished or cannot be read is a bad picture as much as one that is damaged.
        except OSError as error:
            raise BadImageError(f"cannot be read ({error.strerror or error})") from error
        return Opened(index, name, data, self.decoder.header(data))

    def open_first(self, indices: Iterable[int]) -> Opened:
        """The first of `indices` whose header can be read."""
        for index in indices:
            try:
                return self.open(index)
            except BadImageError as error:
                self.bad(self.source.where(index), str(error))
        raise DataError(f"data: {_CANDIDATES} bad images in a row; run `fathoms data check`")


def candidates(seed: int, epoch: int, refs: Refs, slot: int, size: int) -> Iterator[int]:
    """The sample a slot asks for, then the ones that stand in for it, in order."""
    index, repeat = int(refs.index[slot]), int(refs.repeat[slot])
    yield index
    key = sample_keys(seed, epoch, "replace", [index], [repeat])
    for other in uniforms(key, _CANDIDATES)[0]:
        yield int(other * size)
