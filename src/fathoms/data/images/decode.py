"""Decode images to RGB uint8; docs/data.md says what becomes of every way of storing one.

Of a grey or RGB JPEG the crop alone is decoded by `tj3SetCroppingRegion` of libturbojpeg 3, through ctypes: rows above
the crop are entropy-decoded but not transformed, columns outside are dropped, rows below are never read. No Python
package exposes this. Where that library is missing, simplejpeg decodes the whole JPEG. All else is Pillow's.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from fathoms.data.images.image_header import MAX_PIXELS, ImageHeader, hush_pillow, read_header
from fathoms.data.sources.source import BadImageError, formats_here
from fathoms.errors import BackendError, reason
from fathoms.registry import check_name

if TYPE_CHECKING:
    from torch import Tensor


# Top, left, height and width.
Box = tuple[int, int, int, int]


def greyscale(pixels: UInt8[np.ndarray, "*shape 3"]) -> UInt8[np.ndarray, "*shape 3"]:
    """The mean of R, G and B, rounded; pixels that are grey already stay as they are.

    >>> greyscale(np.array([[10, 20, 31], [7, 7, 7]], np.uint8)).tolist()
    [[20, 20, 20], [7, 7, 7]]
    """
    total = pixels.sum(axis=-1, dtype=np.uint16, keepdims=True)
    return np.repeat(((total + 1) // 3).astype(np.uint8), 3, axis=-1)


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

    def decode(self, data: bytes, header: ImageHeader, box: Box) -> np.ndarray:
        """Pixels of `box` = (top, left, height, width) in stored orientation, RGB uint8 (h, w, 3)."""
        _, left, height, width = box
        start, columns = _columns(header, left, width)
        pixels = np.empty((height, columns, 3), np.uint8)
        self.decode_to(pixels.ctypes.data, data, (start, box[0], columns, height))
        return pixels[:, left - start : left - start + width]

    def decode_crops(
        self,
        crops: Sequence[tuple[str, bytes, ImageHeader, Box]],
        limit: int,
        allocate: Callable[[Sequence[int]], Tensor],
        begin: Callable[[str], None],
    ) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """Decode the crops of many files one after another into one buffer; raises the first `BadImageError`.

        Args:
            crops: name, bytes, header and box of each.
            limit: a crop of more pixels, with its margin, is left out.
            allocate: gives the memory of the buffer.
            begin: called with the name of each file before it is decoded.

        Returns:
            Pixels (n, 3); offset and pitch of each crop in pixels, with pitch 0 where a crop was left out.
        """
        offset, pitch = np.zeros((2, len(crops)), np.int64)
        regions: dict[int, tuple[int, Box]] = {}
        total = 0
        for number, (_, _, header, (top, left, height, width)) in enumerate(crops):
            start, columns = _columns(header, left, width)
            if 0 < height * columns <= limit:
                regions[number] = total, (start, top, columns, height)
                offset[number], pitch[number] = total + left - start, columns
                total += height * columns
        pixels = allocate((total, 3))
        address = pixels.data_ptr()
        for number, (before, region) in regions.items():
            name, data, _, _ = crops[number]
            begin(name)
            self.decode_to(address + 3 * before, data, region)
        return pixels, offset, pitch

    def decode_to(self, address: int, data: bytes, region: Box) -> None:
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
            why = " ".join(quick.tj3GetErrorStr(pointer).decode("ascii", "replace").split())
            # A decompressor that stopped half-way keeps its error in some versions: start afresh.
            self._local.handle = None
            raise BadImageError(why)


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


DECODERS = ("auto", "turbojpeg", "simplejpeg")


@dataclass(frozen=True)
class Decoder:
    """A decoder and why it was chosen; `decode(data, box)` gives RGB pixels.

    >>> choose_decoder("simplejpeg").name
    'simplejpeg'
    """

    name: str
    reason: str
    library: TurboJpeg | None = None
    """Decodes the crops of JPEGs; writes one straight to where it is wanted, if `in_place` holds for the image."""
    exif: str = "apply"
    max_pixels: int = MAX_PIXELS
    grey: bool = False
    """Whether colours become the mean of R, G and B."""

    def in_place(self, header: ImageHeader) -> bool:
        """Whether `library` can give this image's pixels as they are stored: of an upright JPEG, grey or RGB."""
        return (
            self.library is not None
            and header.orientation == 1
            and header.format == "JPEG"
            and header.components in ((1,) if self.grey else (1, 3))
        )

    def header(self, data: bytes) -> ImageHeader:
        """The header; with `exif="ignore"` its orientation is 1."""
        header = read_header(data, self.max_pixels)
        if self.exif == "ignore" and header.orientation != 1:
            return replace(header, orientation=1)
        return header

    def decode(
        self, data: bytes, box: Box | None = None, header: ImageHeader | None = None
    ) -> UInt8[np.ndarray, "h w 3"]:
        """Pixels of `box` = (top, left, height, width) in the upright image; all of it by default."""
        header = header or self.header(data)
        height, width = header.shown
        box = box or (0, 0, height, width)
        top, left, rows, columns = box
        if min(top, left) < 0 or min(rows, columns) < 1 or top + rows > height or left + columns > width:
            raise ValueError(f"decode: box {box} is not inside {height}x{width}")
        stored = _stored_box(box, header)
        if header.format != "JPEG" or header.components not in (1, 3):
            pixels = _pillow_region(data, header, stored)
        elif self.library is not None:
            pixels = self.library.decode(data, header, stored)
        else:
            pixels = _simplejpeg_region(data, header, stored)
        if pixels.shape != (stored[2], stored[3], 3):
            raise BadImageError("its pixels do not have the size its header declares")
        pixels = _upright(pixels, header.orientation)
        return greyscale(pixels) if self.grey else pixels


def choose_decoder(
    decoder: str = "auto", exif: str = "apply", max_pixels: int = MAX_PIXELS, grey: bool = False
) -> Decoder:
    """Resolve "auto" to the faster decoder that is installed; an explicit choice is obeyed or refused."""
    check_name(decoder, DECODERS, "decoder", "decoder")
    check_name(exif, ("apply", "ignore"), "EXIF rule", "exif")
    library, found = (None, "") if decoder == "simplejpeg" else load_turbojpeg()
    if library is not None:
        name, why = "turbojpeg", f"crop decode with {found}"
    elif decoder == "turbojpeg":
        raise BackendError(f'decoder="turbojpeg" cannot run: {found}; {HOW_TO_GET}')
    else:
        name, why = "simplejpeg", f"no crop decode: {found}" if decoder == "auto" else "asked for"
    return Decoder(name, why, library, exif, max_pixels, grey)


def _simplejpeg_region(data: bytes, header: ImageHeader, box: Box) -> np.ndarray:
    import simplejpeg

    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError as error:
        raise BadImageError(reason(error)) from error
    if pixels.shape[:2] != (header.height, header.width):
        raise BadImageError("its pixels do not have the size its header declares")
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def _pillow_region(data: bytes, header: ImageHeader, box: Box) -> np.ndarray:
    from PIL import Image

    top, left, height, width = box
    hush_pillow()
    try:
        with Image.open(io.BytesIO(data), formats=formats_here()) as image:
            if image.size != (header.width, header.height):
                raise BadImageError("its pixels do not have the size its header declares")
            if image.mode.startswith("I"):
                return _from_16_bit(np.asarray(image), box)
            region = image.convert("RGB").crop((left, top, left + width, top + height))
            return np.asarray(region)
    except BadImageError:
        raise
    # Pillow's plugins raise anything from SyntaxError to struct.error on damaged input.
    except Exception as error:
        raise BadImageError(reason(error)) from error


def _from_16_bit(values: np.ndarray, box: Box) -> np.ndarray:
    top, left, height, width = box
    grey = np.clip(values[top : top + height, left : left + width], 0, 65535).astype(np.uint16) >> 8
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def _stored_box(box: Box, header: ImageHeader) -> Box:
    """The box of the upright image, in the coordinates of the stored one."""
    top, left, height, width = box
    upright_height, upright_width = header.shown
    bottom, right = upright_height - top - height, upright_width - left - width
    return {
        1: (top, left, height, width),
        2: (top, right, height, width),
        3: (bottom, right, height, width),
        4: (bottom, left, height, width),
        5: (left, top, width, height),
        6: (right, top, width, height),
        7: (right, bottom, width, height),
        8: (left, bottom, width, height),
    }[header.orientation]


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the EXIF orientation; a view, no pixel is copied."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels
