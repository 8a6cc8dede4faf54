"""Decode images to RGB uint8: the crop alone where the library can, and the decoder in use is always reported.

| stored as | becomes |
|---|---|
| grey (1 or 8 bit) | the same value in R, G and B |
| grey, 16 bit | the high byte (Pillow alone would clip at 255 and give white) |
| RGB, 16 bit a channel (PNG, TIFF) | the high byte |
| palette | its colours; transparency is dropped |
| RGBA, LA | its colours; alpha is dropped, as Pillow's convert("RGB") does |
| CMYK, YCCK (JPEG) | Pillow's conversion, with Adobe's inversion |
| EXIF orientation 2 to 8 | rotated upright (`exif="ignore"` leaves it as stored) |
| animation (GIF, WebP, PNG, AVIF), pages of a TIFF | the first frame |
| TIFF, 32 bit or floating point | an error: nothing says which value is white |
| a JPEG that decodes only with warnings | an error: it is damaged |
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import UInt8

from fathoms.data.decode.greyscale import greyscale
from fathoms.data.decode.image_header import MAX_PIXELS, ImageHeader, hush_pillow, read_header
from fathoms.data.decode.turbojpeg import HOW_TO_GET, TurboJpeg, load_turbojpeg
from fathoms.data.errors import BadImageError
from fathoms.data.sources.image_formats import formats_here
from fathoms.errors import BackendError, reason
from fathoms.names.registry import check_name

Box = tuple[int, int, int, int]
DECODERS = ("auto", "turbojpeg", "simplejpeg", "pillow")


@dataclass(frozen=True)
class Decoder:
    """A decoder and why it was chosen; `decode(data, box)` gives RGB pixels.

    >>> choose_decoder("pillow").name
    'pillow'
    """

    name: str
    reason: str
    region: Callable[[bytes, ImageHeader, Box], np.ndarray]
    exif: str = "apply"
    max_pixels: int = MAX_PIXELS
    library: TurboJpeg | None = None
    """Writes a crop straight to where it is wanted, if `in_place` holds for the image."""
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
        if header.format == "JPEG" and header.components in (1, 3):
            pixels = self.region(data, header, stored)
        else:
            pixels = _pillow_region(data, header, stored)
        if pixels.shape != (stored[2], stored[3], 3):
            raise BadImageError("its pixels do not have the size its header declares")
        pixels = _upright(pixels, header.orientation)
        return greyscale(pixels) if self.grey else pixels


def choose_decoder(
    decoder: str = "auto", exif: str = "apply", max_pixels: int = MAX_PIXELS, grey: bool = False
) -> Decoder:
    """Resolve "auto" to the fastest decoder installed; an explicit choice is obeyed or refused."""
    return replace(_installed(decoder, exif, max_pixels), grey=grey)


def _installed(decoder: str, exif: str, max_pixels: int) -> Decoder:
    check_name(decoder, DECODERS, "decoder", "decoder")
    check_name(exif, ("apply", "ignore"), "EXIF rule", "exif")
    library, found = load_turbojpeg() if decoder in ("auto", "turbojpeg") else (None, "")
    if library is not None:
        return Decoder("turbojpeg", f"crop decode with {found}", library.decode, exif, max_pixels, library)
    if decoder == "turbojpeg":
        raise BackendError(f'decoder="turbojpeg" cannot run: {found}; {HOW_TO_GET}')
    why = f"no crop decode: {found}" if decoder == "auto" else "asked for"
    if decoder in ("auto", "simplejpeg"):
        try:
            importlib.import_module("simplejpeg")
        except ImportError as error:
            if decoder == "simplejpeg":
                raise BackendError(
                    'decoder="simplejpeg" cannot run: it is not installed; pip install simplejpeg'
                ) from error
            why += "; simplejpeg is not installed"
        else:
            return Decoder("simplejpeg", why, _simplejpeg_region, exif, max_pixels)
    return Decoder("pillow", why, _pillow_region, exif, max_pixels)


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
