"""Decode only the crop of a JPEG: `tj3SetCroppingRegion` of libturbojpeg 3, through ctypes.

Rows above the crop are entropy-decoded but not transformed, columns outside are dropped, rows below
are never read. No Python package exposes this, so the C functions are called here directly.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fathoms.data.decode.image_header import ImageHeader, read_header
from fathoms.data.errors import BadImageError

if TYPE_CHECKING:
    # Looking at a data set takes no torch, which takes seconds to import.
    from torch import Tensor

# From turbojpeg.h of libjpeg-turbo 3: TJINIT_DECOMPRESS, TJPARAM_STOPONWARNING, TJPF_RGB.
_INIT_DECOMPRESS = 1
_PARAM_STOP_ON_WARNING = 0
_PIXEL_RGB = 0

# Columns of context on either side: chroma is smoothed over two pixels at most.
MARGIN = 2
HOW_TO_GET = "pip install turbojpeg, or install libjpeg-turbo 3 on the system"


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _Handle:
    """A decompressor of one thread; the C object is freed with it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.pointer = library.tj3Init(_INIT_DECOMPRESS)
        if not self.pointer:
            raise MemoryError("tj3Init returned no handle")
        # A file that decodes only with warnings is damaged: an error is better than grey blocks.
        library.tj3Set(self.pointer, _PARAM_STOP_ON_WARNING, 1)

    def __del__(self) -> None:
        if self.pointer:
            self.library.tj3Destroy(self.pointer)
            self.pointer = None


class TurboJpeg:
    """Crop decoding with the library at `path`; safe to use from any number of threads."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library = _bind(ctypes.CDLL(path))
        # The same library, called without releasing the GIL: a call of a few microseconds is over sooner than
        # the GIL is released and taken again.
        self._quick = _bind(ctypes.PyDLL(path))
        self._local = threading.local()

    def _handle(self) -> _Handle:
        handle = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._local.handle = _Handle(self.library)
        return handle

    def decode(self, data: bytes, header: ImageHeader, box: tuple[int, int, int, int]) -> np.ndarray:
        """Pixels of `box` = (top, left, height, width) in stored orientation, RGB uint8 (h, w, 3)."""
        _, left, height, width = box
        start, columns = _columns(header, left, width)
        pixels = np.empty((height, columns, 3), np.uint8)
        self.decode_to(pixels.ctypes.data, data, (start, box[0], columns, height))
        return pixels[:, left - start : left - start + width]

    def decode_crops(
        self,
        crops: Sequence[tuple[str, bytes, ImageHeader, tuple[int, int, int, int]]],
        limit: int,
        allocate: Callable[[Sequence[int]], Tensor],
        begin: Callable[[str], None],
    ) -> tuple[Tensor, np.ndarray, np.ndarray, dict[int, BadImageError]]:
        """Decode the crops of many files one after another into one buffer.

        Args:
            crops: name, bytes, header and box of each.
            limit: a crop of more pixels, with its margin, is left out.
            allocate: gives the memory of the buffer.
            begin: called with the name of each file before it is decoded.

        Returns:
            Pixels (n, 3); offset and pitch of each crop in pixels, with pitch 0 where a crop was left out or failed;
            and the errors, by number.
        """
        offset, pitch = np.zeros(len(crops), np.int64), np.zeros(len(crops), np.int64)
        regions: dict[int, tuple[int, tuple[int, int, int, int]]] = {}
        total = 0
        for number, (_, _, header, (top, left, height, width)) in enumerate(crops):
            start, columns = _columns(header, left, width)
            if 0 < height * columns <= limit:
                regions[number] = total, (start, top, columns, height)
                offset[number], pitch[number] = total + left - start, columns
                total += height * columns
        pixels = allocate((total, 3))
        address, failed = pixels.data_ptr(), {}
        for number, (before, region) in regions.items():
            name, data, _, _ = crops[number]
            begin(name)
            try:
                self.decode_to(address + 3 * before, data, region)
            except BadImageError as error:
                failed[number], pitch[number] = error, 0
        return pixels, offset, pitch, failed

    def decode_to(self, address: int, data: bytes, region: tuple[int, int, int, int]) -> None:
        """Write `region` = (left, top, width, height), whose left and width come from `_columns`, to memory."""
        if min(region[2:]) < 1:
            # To the library zero means the rest of the image, which would be written past the end of the memory.
            raise BadImageError("its crop is empty")
        pointer, quick = self._handle().pointer, self._quick
        failed = (
            quick.tj3DecompressHeader(pointer, data, len(data))
            or quick.tj3SetCroppingRegion(pointer, _Region(*region))
            or self.library.tj3Decompress8(pointer, data, len(data), address, region[2] * 3, _PIXEL_RGB)
        )
        if failed:
            reason = " ".join(quick.tj3GetErrorStr(pointer).decode("ascii", "replace").split())
            # A decompressor that stopped half-way keeps its error in some versions: start afresh.
            self._local.handle = None
            raise BadImageError(reason)


def _columns(header: ImageHeader, left: int, width: int) -> tuple[int, int]:
    """First column and number of columns to decode, so that `width` of them from `left` on are right.

    The library starts a crop only at a whole block, and at the edges of a crop it has no neighbour to smooth
    the colour with. A margin, which the caller cuts off, gives the pixels of a full decode.
    """
    start = max(0, left - MARGIN)
    start -= start % header.mcu_width
    return start, min(left + width + MARGIN, header.width) - start


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the C signatures; raises `AttributeError` where the library is older than 3."""
    handle, size = ctypes.c_void_p, ctypes.c_size_t
    declare = {
        "tj3Init": (handle, [ctypes.c_int]),
        "tj3Destroy": (None, [handle]),
        "tj3Set": (ctypes.c_int, [handle, ctypes.c_int, ctypes.c_int]),
        "tj3GetErrorStr": (ctypes.c_char_p, [handle]),
        "tj3DecompressHeader": (ctypes.c_int, [handle, ctypes.c_char_p, size]),
        "tj3SetCroppingRegion": (ctypes.c_int, [handle, _Region]),
        "tj3Decompress8": (ctypes.c_int, [handle, ctypes.c_char_p, size, handle, ctypes.c_int, ctypes.c_int]),
    }
    for name, (result, arguments) in declare.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def library_paths() -> list[str]:
    """Where a libturbojpeg may be: on the system, and inside the `turbojpeg` wheel."""
    found = [ctypes.util.find_library("turbojpeg")]
    try:
        files = importlib.metadata.files("turbojpeg") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found += [str(Path(str(file.locate()))) for file in files if "libturbojpeg" in file.name]
    return [path for path in found if path]


@functools.cache
def load_turbojpeg() -> tuple[TurboJpeg | None, str]:
    """The library and its path, or None and the reason why crop decoding is not available."""
    reasons = []
    for path in library_paths():
        try:
            library = TurboJpeg(path)
            _self_check(library)
        except AttributeError:
            reasons.append(f"{path} is older than version 3")
        except (OSError, MemoryError, BadImageError, ValueError) as error:
            reasons.append(f"{path} cannot be used ({error})")
        else:
            return library, path
    return None, "; ".join(reasons) or "no libturbojpeg was found"


def _self_check(library: TurboJpeg) -> None:
    """Compare one small crop with Pillow's pixels, so that a library with another ABI is refused."""
    from PIL import Image

    ramp = np.add.outer(np.arange(48) * 2, np.arange(64) * 2).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.stack([ramp, ramp[::-1], ramp[:, ::-1]], -1)).save(buffer, "JPEG", quality=95)
    data = buffer.getvalue()
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))[9:39, 21:53].astype(int)
    got = library.decode(data, read_header(data), (9, 21, 30, 32)).astype(int)
    # Builds differ in the rounding of the inverse transform by a level or two, never more on average.
    if np.abs(got - expected).mean() > 1.0:
        raise ValueError("its pixels differ from Pillow's")
