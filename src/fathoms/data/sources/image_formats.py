"""Image formats that are read, by content and by file name, and why the others of Pillow are not.

| left out | because |
|---|---|
| EPS, WMF, EMF | drawing them runs another program (Ghostscript, Windows) |
| BUFR, GRIB, HDF5, MPEG, MIC, FPX | Pillow only recognises them, or needs code that others register |
| ICO, ICNS, CUR, DCX, PSD, IPTC | containers: the picture inside may be larger than the size that was checked |
| FITS, SPIDER, IM, IMT, MCIDAS | measurements without a range that would be black and white |
| BLP, DDS, FTEX, GBR, FLI, PCD, PIXAR, MSP, SUN, XBM, XPM, XVTHUMB | textures and brushes: hardly tested readers |
"""

from __future__ import annotations

import functools

SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "AVIF": (".avif", ".avifs"),
    "TIFF": (".tif", ".tiff"),
    "BMP": (".bmp",),
    "DIB": (".dib",),
    "GIF": (".gif",),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "TGA": (".tga",),
    "PCX": (".pcx",),
    "SGI": (".sgi",),
    "QOI": (".qoi",),
}
"""Pillow's name of each format, in the order in which they are tried, and the file names that count as images."""
FORMATS = tuple(SUFFIXES)
IMAGE_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
# Where the name of a brand stands in the first box of the file.
_AVIF = slice(4, 12), (b"ftypavif", b"ftypavis")


@functools.cache
def formats_here() -> tuple[str, ...]:
    """The formats that the installed Pillow has a reader for."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def missing_reader(data: bytes) -> str | None:
    """The package to install for an image that only a newer Pillow reads; None for any other."""
    place, brands = _AVIF
    if data[place] in brands and "AVIF" not in formats_here():
        return "AVIF is not read by this Pillow; pip install 'pillow>=11.3'"
    return None
