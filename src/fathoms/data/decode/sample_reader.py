"""Read samples: encoded bytes and headers, and the samples that replace a bad one."""

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

# Give up after this many bad images in a row; the allowed share is exceeded long before.
_CANDIDATES = 32


class EncodedImage(NamedTuple):
    """An image that was read but not decoded."""

    index: int
    name: str
    data: bytes
    header: ImageHeader
    in_place: bool
    """Whether `Decoder.library` can decode a crop of it straight to where it is wanted."""


@dataclass(frozen=True)
class SampleReader:
    """The source of encoded images and their decoder; `begin` and `bad` report to the loader."""

    source: Source
    decoder: Decoder
    begin: Callable[[str], None]
    bad: Callable[[str, str], None]

    def open(self, index: int) -> EncodedImage:
        """Bytes and header of one image; raises `BadImageError`."""
        name = self.source.where(index)
        self.begin(name)
        try:
            data = self.source.read(index)
        # A file that vanished or cannot be read is as bad as one that is damaged.
        except OSError as error:
            raise BadImageError(f"cannot be read ({error.strerror or error})") from error
        header = self.decoder.header(data)
        return EncodedImage(index, name, data, header, self.decoder.in_place(header))

    def open_first(self, indices: Iterable[int]) -> EncodedImage:
        """The first of `indices` whose header can be read."""
        for index in indices:
            try:
                return self.open(index)
            except BadImageError as error:
                self.bad(self.source.where(index), str(error))
        raise DataError(f"data: {_CANDIDATES} bad images in a row; run `fathoms data check`")


def replacements(seed: int, epoch: int, refs: Refs, slot: int, size: int) -> Iterator[int]:
    """The sample of a slot, then those that replace it if it is bad, in order."""
    index, repeat = int(refs.index[slot]), int(refs.repeat[slot])
    yield index
    key = sample_keys(seed, epoch, "replace", [index], [repeat])
    for other in uniforms(key, _CANDIDATES)[0]:
        yield int(other * size)
