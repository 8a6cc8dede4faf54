"""Index of an untrusted tar file: nothing is extracted, and anything but plain files is refused.

An image archive needs plain files with plain names. Links, devices, absolute names, `..`, duplicate names and
entries that reach past the end of the file have no use in one, so they are refused instead of cleaned up.
"""

from __future__ import annotations

import os
import tarfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from fathoms.data.errors import ArchiveError, BadImageError
from fathoms.data.sources.base import MAX_FILE
from fathoms.errors import reason

_BLOCK = 512
# An extended header holds a name or two.
_LONGEST_HEADER = 1 << 16
_LONGEST_NAME = 4096


@dataclass(frozen=True)
class Member:
    """One file of an archive: its name, and the offset and size of its bytes."""

    name: str
    offset: int
    size: int


class _Forward:
    """A file that is only read forwards and in small pieces.

    tarfile trusts headers. A negative size sends older versions back to the same header forever (CVE-2025-8194),
    and an extended header may ask for gigabytes at once.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._furthest = file, 0

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        data = self._file.read(size)
        self._furthest = self._file.tell()
        return data

    def seek(self, place: int) -> None:
        # tarfile seeks to the byte before the next header, which may be the last one read.
        if place < self._furthest - _BLOCK:
            raise ValueError(f"byte {self._furthest} points back to byte {place}")
        self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


def check_member_name(name: str, where: str) -> None:
    """Refuse a name that points outside the archive or would garble a terminal."""
    parts = PurePosixPath(name).parts
    if not name or name.startswith("/") or "\\" in name or ".." in parts or (parts and ":" in parts[0]):
        raise ArchiveError(f"{where}: member {name[:80]!r} points outside the archive; do not use this file")
    if len(name) > _LONGEST_NAME or any(unicodedata.category(letter) == "Cc" for letter in name):
        raise ArchiveError(
            f"{where}: member {name[:80]!r} is too long or has control characters in its name; rename it"
        )


def read_index(path: str | Path) -> list[Member]:
    """List the files of an uncompressed tar, in order; raises `ArchiveError` with the reason."""
    where, length = str(path), Path(path).stat().st_size
    members: list[Member] = []
    seen: set[str] = set()
    try:
        with (
            Path(path).open("rb") as file,
            tarfile.open(fileobj=cast(BinaryIO, _Forward(file)), mode="r:") as archive,
        ):
            for entry in archive:
                if entry.isdir():
                    # The root of an archive may be listed under an empty name.
                    check_member_name(entry.name or ".", where)
                    continue
                if not entry.isreg() or entry.issparse():
                    kind = "a link" if entry.islnk() or entry.issym() else "not a plain file"
                    raise ArchiveError(
                        f"{where}: member {entry.name[:80]!r} is {kind}; pack plain files only"
                    )
                check_member_name(entry.name, where)
                name = str(PurePosixPath(entry.name))
                if name in seen:
                    raise ArchiveError(f"{where}: member {name[:80]!r} occurs twice; pack it once")
                if entry.size < 0 or entry.offset_data + entry.size > length:
                    raise ArchiveError(f"{where}: member {name[:80]!r} is cut off; copy the archive again")
                seen.add(name)
                members.append(Member(name, entry.offset_data, entry.size))
                # tarfile keeps every entry it has seen; over a million of them that is gigabytes.
                archive.members = []  # pyrefly: ignore[missing-attribute]
            end = archive.offset
    # A chain of extended headers makes tarfile call itself, once for each.
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ArchiveError(
            f"{where}: not a readable uncompressed tar ({reason(error)}); pack it again"
        ) from error
    _check_end(path, end, length)
    return members


def _check_end(path: str | Path, end: int, length: int) -> None:
    """Refuse garbage after the last entry: tarfile mistakes a damaged header for the end."""
    with Path(path).open("rb") as file:
        file.seek(end)
        block = file.read(_BLOCK)
    if end >= length or not any(block):
        return
    raise ArchiveError(f"{path}: damaged header at byte {end}; copy the archive again")


def read_at(descriptor: int, member: Member, archive: str) -> bytes:
    """Read one member; a file that shrank since it was indexed is an error, not a truncated image."""
    size = member.size
    if size > MAX_FILE:
        raise BadImageError(f"its {size} bytes are more than {MAX_FILE}")
    data = os.pread(descriptor, size, member.offset)
    if len(data) != size:
        raise ArchiveError(
            f"{archive}!{member.name}: only {len(data)} of {size} bytes could be read; copy the archive again"
        )
    return data
