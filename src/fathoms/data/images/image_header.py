"""Image headers: format, size and orientation from the first bytes; nothing is decoded.

The crop box is drawn from the header, so that only the crop is decoded, and an image that declares an absurd size is
refused before memory is allocated for it.
"""

from __future__ import annotations

import functools
import io
import re
import struct
import warnings
from dataclasses import dataclass
from typing import Any

from fathoms.data.sources.source import BadImageError, formats_here
from fathoms.errors import reason

# 67 million pixels are 200 MB of RGB: more than any camera image a classifier needs, and small
# enough that sixteen workers fit in a server's memory.
MAX_PIXELS = 1 << 26
# A progressive file has about ten scans. Thousands of scans cost seconds each without a large file.
MAX_SCANS = 64
# Segments before the frame header. The longest colour profile takes 255; empty ones could be endless.
MAX_SEGMENTS = 4096
# A tile of a TIFF may be larger than its image, but not by much: all of it is allocated.
_MAX_TILE = 1 << 22

_ORIENTATION_TAG = 0x0112
_TILE_TAGS = 322, 323
_PILLOW = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@dataclass(frozen=True)
class ImageHeader:
    """Format, stored size and orientation of an image.

    `width` and `height` are as stored; `shown` is the size after the EXIF rotation.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    components: int = 3
    mcu_width: int = 0
    progressive: bool = False
    mode: str = "RGB"

    @property
    def shown(self) -> tuple[int, int]:
        """(height, width) as a viewer shows it."""
        if self.orientation >= 5:
            return self.width, self.height
        return self.height, self.width


def read_header(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """Read the header of an encoded image; raises `BadImageError` with the reason."""
    if not data:
        raise BadImageError("the file is empty")
    header = _read_jpeg(data) if data[:2] == b"\xff\xd8" else _read_other(data, max_pixels)
    check_size(header.width, header.height, max_pixels)
    # Entropy-coded bytes never hold FF DA, so counting it counts the scans (or more, never fewer).
    if header.progressive and data.count(b"\xff\xda") > MAX_SCANS:
        raise BadImageError(f"progressive JPEG with more than {MAX_SCANS} scans")
    return header


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    if width < 1 or height < 1:
        raise BadImageError(f"it declares {width}x{height} pixels")
    if width * height > max_pixels:
        raise BadImageError(f"it declares {width}x{height} pixels, more than the limit of {max_pixels}")


def _read_jpeg(data: bytes) -> ImageHeader:
    """Walk the JPEG segments up to the frame header; note EXIF on the way."""
    place, end, orientation = 2, len(data), 1
    segments = 0
    while place + 4 <= end:
        segments += 1
        if segments > MAX_SEGMENTS:
            raise BadImageError(f"JPEG with more than {MAX_SEGMENTS} segments before its frame header")
        if data[place] != 0xFF:
            raise BadImageError(f"JPEG marker expected at byte {place}")
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            place += 2
            continue
        if marker in (0xD9, 0xDA):
            raise BadImageError("JPEG without a frame header")
        length = (data[place + 2] << 8) | data[place + 3]
        body = place + 4
        place += 2 + length
        if length < 2 or place > end:
            raise BadImageError("JPEG segment runs past the end of the file")
        if marker == 0xE1 and data[body : body + 6] == b"Exif\x00\x00":
            orientation = _exif_orientation(data[body + 6 : place])
        # 0xC0 to 0xCF are frame headers, apart from three tables that share the range.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            # The tables of four components end within 18 bytes; what follows says nothing more.
            return _frame(data[body : min(place, body + 18)], marker, orientation)
    raise BadImageError("JPEG ends inside its header")


@functools.lru_cache(1024)
def _frame(frame: bytes, marker: int, orientation: int) -> ImageHeader:
    """Parse a frame header; cached, because images of one size and kind have the same one."""
    if len(frame) < 6:
        raise BadImageError("JPEG frame header is too short")
    precision, height, width, components = struct.unpack(">BHHB", frame[:6])
    if precision != 8:
        raise BadImageError(f"JPEG with {precision} bits a sample; only 8 are supported")
    if components not in (1, 3, 4) or len(frame) < 6 + 3 * components:
        raise BadImageError(f"JPEG with {components} components")
    if marker not in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA):
        raise BadImageError("lossless or hierarchical JPEG")
    sampling = [frame[7 + 3 * i] >> 4 for i in range(components)]
    if not all(1 <= factor <= 4 for factor in sampling):
        raise BadImageError("JPEG with impossible sampling factors")
    mode = {1: "L", 3: "RGB", 4: "CMYK"}[components]
    mcu = 8 if components == 1 else 8 * max(sampling)
    return ImageHeader("JPEG", width, height, orientation, components, mcu, marker in (0xC2, 0xCA), mode)


def _exif_orientation(tiff: bytes) -> int:
    """The orientation tag (1 to 8) of an EXIF block; 1 where it is absent or makes no sense."""
    if len(tiff) < 8 or tiff[:2] not in (b"II", b"MM"):
        return 1
    order = "<" if tiff[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for entry in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind = struct.unpack_from(order + "HH", tiff, entry)
        if tag == _ORIENTATION_TAG and kind == 3:
            (value,) = struct.unpack_from(order + "H", tiff, entry + 8)
            return value if 1 <= value <= 8 else 1
    return 1


def _read_other(data: bytes, max_pixels: int) -> ImageHeader:
    """Let Pillow read the header of every format but JPEG."""
    from PIL import Image, UnidentifiedImageError

    hush_pillow()
    try:
        with Image.open(io.BytesIO(data), formats=formats_here()) as image:
            width, height = image.size
            check_size(width, height, max_pixels)
            orientation = image.getexif().get(_ORIENTATION_TAG, 1)
            mode, kind = image.mode, image.format or "?"
            if kind == "TIFF":
                _check_tiles(image, width * height)
                # Pillow rotates a TIFF itself, and gives the size that it then has.
                orientation = 1
    except BadImageError:
        raise
    except Image.DecompressionBombError as error:
        raise BadImageError(f"it declares too many pixels ({reason(error)})") from error
    except UnidentifiedImageError as error:
        listed = ", ".join(formats_here())
        raise BadImageError(f"not an image of a format that this Pillow reads ({listed})") from error
    except Exception as error:
        raise BadImageError(f"not an image that can be read ({reason(error)})") from error
    _check_depth(kind, mode)
    if not isinstance(orientation, int) or not 1 <= orientation <= 8:
        orientation = 1
    return ImageHeader(kind, width, height, orientation, mode=mode)


def _check_tiles(image: Any, pixels: int) -> None:
    """Refuse a TIFF of small size in huge tiles."""
    across, down = (image.tag_v2.get(tag, 1) for tag in _TILE_TAGS)
    if not (isinstance(across, int) and isinstance(down, int)) or across * down > max(pixels, _MAX_TILE):
        raise BadImageError(f"TIFF of {pixels} pixels in tiles of {str(across)[:20]}x{str(down)[:20]}")


def _check_depth(kind: str, mode: str) -> None:
    """Refuse pixels without a known range: nothing says which value is white."""
    if mode == "F" or (kind == "TIFF" and mode == "I"):
        stored = "floating-point" if mode == "F" else "32-bit"
        raise BadImageError(f"{kind} with {stored} pixels, whose range is not known; store 8 or 16 bits")


def hush_pillow() -> None:
    """Silence Pillow's warnings, for good.

    They concern sizes, which are checked here, and what does not affect the pixels: a broken EXIF block, a
    palette with transparency. `catch_warnings` is not thread-safe: two threads that decode at once would leave the
    whole process without warnings.
    """
    if _PILLOW not in warnings.filters:
        warnings.filterwarnings("ignore", module=_PILLOW[3].pattern)
