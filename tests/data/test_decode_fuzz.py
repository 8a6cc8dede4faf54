"""Mutated images: no crash, no hang, bounded memory, and every refusal has a reason; benchmarks/fuzz.py runs more."""

import collections
import io
import resource
import struct
import time

import numpy as np
from PIL import Image

from fathoms.data import BadImageError, choose_decoder
from fathoms.data.dataset_check import inspect_file
from fathoms.data.sources.source import FORMATS


def seeds_of_mutation():
    rng = np.random.default_rng(0)
    files = []
    for height, width, options in (
        (64, 96, {"subsampling": 0}),
        (97, 61, {"subsampling": 2}),
        (80, 80, {"progressive": True}),
        (50, 70, {"restart_marker_rows": 1}),
    ):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        exif = Image.Exif()
        exif[0x0112] = 6
        buffer = io.BytesIO()
        coarse.resize((width, height)).save(buffer, "JPEG", quality=90, exif=exif, **options)
        files.append(buffer.getvalue())
    grey = io.BytesIO()
    coarse.resize((40, 30)).convert("L").save(grey, "JPEG")
    return [*files, grey.getvalue()]


def other_formats():
    """A small image in each format that Pillow decodes for us."""
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (17, 23, 3), dtype=np.uint8))
    files = []
    for kind in [kind for kind in FORMATS if kind != "JPEG"]:
        for options in ({}, {"compression": "tiff_lzw"}, {"compression": "jpeg"})[
            : 3 if kind == "TIFF" else 1
        ]:
            buffer = io.BytesIO()
            small.save(buffer, kind, **options)
            files.append(buffer.getvalue())
    return files


def mutate(data, rng):
    """Truncate, flip, lie about a length, or declare an absurd size."""
    kind = rng.integers(0, 6)
    body = bytearray(data)
    if kind == 0:
        return bytes(body[: rng.integers(0, len(body))])
    if kind == 1:
        for _ in range(int(rng.integers(1, 12))):
            body[rng.integers(0, len(body))] ^= 1 << int(rng.integers(0, 8))
    elif kind == 2:
        place = int(rng.integers(2, len(body) - 2))
        body[place : place + 2] = struct.pack(">H", int(rng.integers(0, 65536)))
    elif kind == 3:
        markers = [i for i in range(len(body) - 9) if body[i] == 0xFF and 0xC0 <= body[i + 1] <= 0xC2]
        if not markers:
            return mutate(data, rng)
        place = markers[int(rng.integers(0, len(markers)))]
        body[place + 5 : place + 9] = struct.pack(">HH", *(int(v) for v in rng.integers(0, 65536, 2)))
    elif kind == 4:
        first, last = sorted(int(v) for v in rng.integers(0, len(body), 2))
        del body[first:last]
    else:
        place = int(rng.integers(0, len(body)))
        body[place:place] = bytes(rng.integers(0, 256, int(rng.integers(1, 200)), dtype=np.uint8))
    return bytes(body)


class OneFile:
    """A source that holds one file."""

    kind, split, classes, labels = "memory", "all", ("x",), np.zeros(1, np.int64)

    def __init__(self, data, name):
        self.data, self.name = data, name

    def __len__(self):
        return 1

    def read(self, index):  # noqa: ARG002
        return self.data

    def where(self, index):  # noqa: ARG002
        return self.name

    def size(self, index):  # noqa: ARG002
        return len(self.data)

    def fingerprint(self):
        return self.name


def run(cases, originals=None):
    """Decode `cases` mutants, whole and cropped; returns counts, the longest time and the memory grown."""
    originals = originals or seeds_of_mutation()
    # A limit far below the default keeps the test small; a mutant may still declare that much.
    decoders = [choose_decoder(name, max_pixels=1 << 22) for name in ("auto", "simplejpeg")]
    for data in originals:
        decoders[0].decode(data)
    count, longest = collections.Counter(), 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(cases):
        rng = np.random.default_rng([1, case])
        data = mutate(originals[case % len(originals)], rng)
        began = time.perf_counter()
        for decoder in decoders:
            try:
                header = decoder.header(data)
                height, width = header.shown
                decoder.decode(
                    data, (height // 3, width // 3, height - height // 3, width - width // 3), header
                )
                count["decoded"] += 1
            except BadImageError as error:
                count["refused" if str(error) else "refused without a reason"] += 1
            file = inspect_file(OneFile(data, f"case {case}"), decoder, 0)
            assert file.row.name == f"case {case}"
            count["named" if file.problem else "passed"] += 1
        longest = max(longest, time.perf_counter() - began)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return count, longest, grown


def test_a_thousand_mutants_neither_crash_nor_hang_nor_fill_memory():
    count, longest, grown = run(1000)
    assert count["refused"] > 500
    assert not count["refused without a reason"]
    assert longest < 2.0
    # One image at the limit of 4 million pixels takes 12 MB, a progressive one 24 MB of coefficients more.
    assert grown < 300 << 10, f"{grown >> 10} MiB"


def test_a_thousand_mutants_of_other_formats_neither_crash_nor_hang_nor_fill_memory(capfd):
    count, longest, grown = run(1000, other_formats())
    assert count["refused"] > 300
    assert not count["refused without a reason"]
    assert longest < 2.0
    assert grown < 300 << 10, f"{grown >> 10} MiB"
    # libtiff reports damage on stderr itself; whatever it writes is text.
    assert capfd.readouterr().err.isascii()
