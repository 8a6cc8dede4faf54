"""Untrusted tars and images: refused or converted as documented, with memory and time bounded."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from fathoms.data import ArchiveError, BadImageError, DataError, choose_decoder, open_source
from fathoms.data.sources.tar_files import read_index
from tiny_data import png_chunk

pytestmark = pytest.mark.plain


def block(name: str, size: int | bytes, kind: bytes = b"0") -> bytes:
    """One tar header; a size in bytes is written as it is."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size if isinstance(size, int) else 0
    raw = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if isinstance(size, bytes):
        raw[124:136] = size
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    return bytes(raw)


def negative(value: int) -> bytes:
    """A size below zero in the base-256 form of GNU tar."""
    return b"\xff" + (256**11 - value).to_bytes(11, "big")


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


TARS = {
    "negative size": block("train/a/1.jpg", negative(512)),
    "negative size of an extended header": block("x", negative(1024), b"x") + bytes(1024),
    "negative size of a long name": block("x", negative(1024), b"L") + bytes(1024),
    "huge declared size": block("train/a/1.jpg", 0o77777777777),
    "huge extended header": block("x", 0o77777777777, b"x"),
    "huge long name": block("x", 0o77777777777, b"L"),
    "chain of extended headers": (block("x", 11, b"x") + padded(b"11 path=abc")) * 5000,
    "chain of long names": (block("x", 4, b"L") + padded(b"abc\0")) * 5000,
    "chain of global headers": (block("x", 11, b"g") + padded(b"11 path=abc")) * 5000,
    "extended header with a size": block("x", 20, b"x")
    + padded(b"20 size=-9999999999\n")
    + block("train/a/1.jpg", 0),
    "extended path that climbs": block("x", 21, b"x")
    + padded(b"21 path=../../etc/a.j\n")
    + block("train/a/1.jpg", 0),
    "old sparse file": block("train/a/1.jpg", 0, b"S") + bytes(512),
    "device": block("train/a/1.jpg", 0, b"3"),
    "block device": block("train/a/1.jpg", 0, b"4"),
    "unknown kind": block("train/a/1.jpg", 0, b"Z"),
    "control characters of eight bits": block("train/a/\x9b2J.jpg", 0),
    "a drive": block("C:/a/1.jpg", 0),
    "no end": b"\x00" * 511 + b"\x01",
    "a word": b"hello",
    "empty": b"",
}


@pytest.mark.parametrize("kind", TARS)
def test_an_untrusted_tar(kind, place):
    (place / "t.tar").write_bytes(TARS[kind] + (bytes(1024) if len(TARS[kind]) % 512 == 0 else b""))
    # An empty archive has no images, which is a plain data error; every other one is refused as an archive.
    refusal = DataError if kind in ("empty", "no end") else ArchiveError
    with pytest.raises(refusal) as caught:
        open_source(place / "t.tar")
    assert str(caught.value).isprintable()
    assert [path.name for path in place.iterdir()] == ["t.tar"]


def test_a_tar_with_holes_cannot_ask_for_more_than_there_is(place, bounded, one_line):
    """Files of a terabyte that take no room on the disk: headers and members that cover them."""
    for name, kind in (("pax.tar", b"x"), ("long.tar", b"L"), ("member.tar", b"0")):
        with (place / name).open("wb") as file:
            file.write(block("train/a/1.jpg", b"\x80" + (1 << 39).to_bytes(11, "big"), kind))
            file.truncate((1 << 39) + 4096)
    (place / "d" / "train" / "a").mkdir(parents=True)
    with (place / "d" / "train" / "a" / "1.jpg").open("wb") as file:
        file.write(b"\xff\xd8")
        file.truncate(1 << 40)
    (place / "d" / "train" / "a" / "2.jpg").symlink_to("/dev/zero")
    os.mkfifo(place / "d" / "train" / "a" / "3.jpg")
    pax, long, member, folder = bounded(
        ["data", "info", "pax.tar"],
        ["data", "info", "long.tar"],
        ["data", "check", "member.tar", "--workers", "1"],
        ["data", "check", "d", "--workers", "1"],
    )
    one_line(pax, "a header of")
    one_line(long, "a header of")
    assert member["code"] == 1
    assert "more than" in member["out"]
    assert folder["code"] == 1
    assert folder["out"].count("BAD") == 3
    assert "not a regular file" in folder["out"]


def label_tar(place, label: str):
    with tarfile.open(place / "train-000000.tar", "w") as archive:
        for name, data in (("0.jpg", b"x"), ("0.cls", label.encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return place / "train-000000.tar"


def npy(shape: tuple, data: bytes = b"") -> bytes:
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data


def test_small_files_that_ask_for_much_memory_are_refused(place, bounded, one_line):
    import gzip
    import zipfile

    label_tar(place, "999999999")
    with zipfile.ZipFile(place / "wide.npz", "w") as archive:
        archive.writestr("x_train.npy", npy((10**9, 10**4)))
        archive.writestr("y_train.npy", npy((1,), b"\x00"))
    with zipfile.ZipFile(place / "zeros.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("y_train.npy", npy((1,), b"\x00"))
        with archive.open("x_train.npy", "w", force_zip64=True) as member:
            member.write(npy((300, 1 << 20)))
            for _ in range(300):
                member.write(bytes(1 << 20))
    # A bomb without a header, one that unpacks to more than it declares, and one that declares gigabytes.
    heads = {"bare": b"", "lying": struct.pack(">IIII", 0x803, 1, 8, 8)}
    heads["honest"] = struct.pack(">IIII", 0x803, 3 << 10, 1 << 10, 1 << 10)
    for name, head in heads.items():
        (place / name).mkdir()
        count = 1 if name == "lying" else 3 << 10
        (place / name / "train-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + bytes(count)
        )
        with gzip.open(place / name / "train-images-idx3-ubyte.gz", "wb") as file:
            file.write(head)
            for _ in range(300):
                file.write(bytes(1 << 20))
    labels, wide, zeros, bare, lying, honest = bounded(
        ["data", "info", "train-000000.tar"],
        ["data", "info", "wide.npz"],
        ["data", "info", "zeros.npz"],
        *(["data", "info", name] for name in heads),
    )
    one_line(labels, "labels run to 999999999")
    one_line(wide, "would unpack to")
    one_line(zeros, "would unpack to")
    one_line(bare, "not an IDX file of unsigned bytes")
    one_line(lying, "more than the declared (1, 8, 8) values")
    one_line(honest, "do not hold (3072, 1024, 1024) values")


def png(width: int, height: int, *extra: bytes, depth: int = 1) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0))
    rows = zlib.compress(bytes(min(1 << 20, (1 + (width * depth + 7) // 8) * height)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def photo(kind: str = "JPEG", **options) -> bytes:
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)).save(buffer, kind, **options)
    return buffer.getvalue()


def cmyk() -> bytes:
    buffer = io.BytesIO()
    Image.new("CMYK", (56, 40), (9, 80, 200, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


def with_segment(marker: int, body: bytes, times: int = 1) -> bytes:
    data = photo()
    segment = bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body
    return data[:2] + segment * times + data[2:]


def exif(*entries: tuple[int, int, int, int], first: int = 8) -> bytes:
    body = b"Exif\0\0II*\0" + struct.pack("<I", first) + struct.pack("<H", len(entries))
    return body + b"".join(struct.pack("<HHII", *entry) for entry in entries) + struct.pack("<I", 8)


def moving(kind: str) -> bytes:
    rng = np.random.default_rng(1)
    frames = [Image.fromarray(rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)) for _ in range(30)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=10)
    return buffer.getvalue()


def tiff(*entries: tuple[int, int, int]) -> bytes:
    """A TIFF of one grey pixel with further (tag, type, value) entries."""
    tags = {256: (3, 1), 257: (3, 1), 258: (3, 8), 259: (3, 1), 262: (3, 1), 273: (4, 0), 277: (3, 1)}
    tags |= {278: (3, 1), 279: (4, 1)} | {tag: (kind, value) for tag, kind, value in entries}
    rows = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, (kind, value) in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + rows + struct.pack("<I", 0) + bytes(64)


BOMB = zlib.compress(bytes(64 << 20))
# What becomes of each: pixels of this height and width, or a refusal that says why.
IMAGES = {
    "png of 3.6 billion pixels": (png(60_000, 60_000), "it declares too many pixels"),
    "png of 144 million pixels": (png(12_000, 12_000), "more than the limit"),
    "png of 2^31 squared": (png(2**31 - 1, 2**31 - 1), ""),
    "png without a side": (png(0, 5), ""),
    "png with a profile of 64 MB": (png(8, 64, png_chunk(b"iCCP", b"p\0\0" + BOMB)), "too large"),
    "png with a text of 64 MB": (png(8, 64, png_chunk(b"zTXt", b"t\0\0" + BOMB)), "too large"),
    "png with a text in many pieces": (
        png(8, 64, *[png_chunk(b"zTXt", b"t\0\0" + BOMB[:2000])] * 200),
        "too large",
    ),
    "jpeg with broken exif": (with_segment(0xE1, exif((0x0112, 3, 1, 6), first=9999)), (40, 56)),
    "jpeg with exif that loops": (with_segment(0xE1, exif((0x8769, 4, 1, 8))), (40, 56)),
    "jpeg with 4 billion exif entries": (with_segment(0xE1, exif((0x0112, 3, 2**32 - 1, 6))), (56, 40)),
    "jpeg turned by 99": (with_segment(0xE1, exif((0x0112, 3, 1, 99))), (40, 56)),
    "jpeg with a profile of 16 MB": (with_segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(65_000), 255), (40, 56)),
    "jpeg with endless segments": (with_segment(0xE0, b"", 1_000_000), "more than 4096 segments"),
    "jpeg in cmyk": (cmyk(), (40, 56)),
    "moving gif": (moving("GIF"), (40, 56)),
    "moving webp": (moving("WEBP"), (40, 56)),
    "moving png": (moving("PNG"), (40, 56)),
    "gif of a giant screen": (
        b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\0\0\0\0\x01\0\x01\0\0\2\2L\1\0;",
        "it declares too many pixels",
    ),
    "tiff": (tiff(), (1, 1)),
    "tiff of 3.6 billion pixels": (tiff((256, 4, 60_000), (257, 4, 60_000)), "it declares"),
    "tiff of a pixel in a giant tile": (
        tiff((322, 4, 40_000), (323, 4, 40_000), (324, 4, 0), (325, 4, 64)),
        "in tiles of 40000x40000",
    ),
    "postscript in a tiff's name": (b"%!PS-Adobe-3.0 EPSF-3.0\n" + tiff(), "not an image"),
    "icon": (photo("ICO"), "not an image"),
    "postscript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch x) (w) file\n",
        "not an image",
    ),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "not an image"),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_an_untrusted_image(kind, place):
    data, expected = IMAGES[kind]
    if isinstance(expected, tuple):
        assert choose_decoder().decode(data).shape == (*expected, 3)
    else:
        with pytest.raises(BadImageError) as caught:
            choose_decoder().decode(data)
        assert expected in str(caught.value)
        assert str(caught.value).isprintable()
    assert not list(place.iterdir())


def test_a_folder_of_bombs_is_checked_within_a_gigabyte(place, bounded):
    (place / "d" / "train" / "a").mkdir(parents=True)
    for number, (data, _) in enumerate(IMAGES.values()):
        (place / "d" / "train" / "a" / f"{number:02d}.png").write_bytes(data)
    (report,) = bounded(["data", "check", "d", "--workers", "1", "--near", "-1"])
    assert report["code"] == 1
    refused = sum(isinstance(expected, str) for _, expected in IMAGES.values())
    assert report["out"].count("BAD") == refused, report["out"]
    assert report["seconds"] < 20


def test_the_index_of_a_plain_tar_is_read_as_before(place):
    with tarfile.open(place / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("train/a/" + "long" * 60 + ".jpg", "train/ä/1.jpg", "train/b/2.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 700
            archive.addfile(info, io.BytesIO(bytes(700)))
    assert [member.size for member in read_index(place / "t.tar")] == [700] * 3
