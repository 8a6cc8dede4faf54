"""Decoding: every kind of image becomes the RGB pixels that the table in decode.py promises, by every decoder."""

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageOps

from fathoms.data import BadImageError, choose_decoder
from fathoms.data.images import image_header
from fathoms.data.images.decode import load_turbojpeg
from fathoms.data.images.image_header import read_header
from fathoms.data.sources.source import FORMATS
from fathoms.errors import BackendError, UnknownNameError
from tiny_data import png_chunk

DECODERS = ["turbojpeg", "simplejpeg"]


@pytest.fixture(params=DECODERS)
def decoder(request):
    if request.param == "turbojpeg" and load_turbojpeg()[0] is None:
        pytest.skip(load_turbojpeg()[1])
    return choose_decoder(request.param)


def pillow_rgb(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_crop_has_the_pixels_of_the_whole_image(decoder, photo, encoded, subsampling, progressive):
    data = encoded(photo(1, 101, 133), subsampling=subsampling, progressive=progressive)
    whole = pillow_rgb(data)
    rng = np.random.default_rng(0)
    for _ in range(20):
        height, width = int(rng.integers(1, 102)), int(rng.integers(1, 134))
        top, left = int(rng.integers(0, 102 - height)), int(rng.integers(0, 134 - width))
        crop = decoder.decode(data, (top, left, height, width)).astype(int)
        expected = whole[top : top + height, left : left + width]
        # Two builds of libjpeg-turbo may round the inverse transform differently by a level.
        assert np.abs(crop - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone_before_cropping(decoder, photo, encoded, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(2, 61, 93), exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        upright = np.asarray(ImageOps.exif_transpose(image))
    assert read_header(data).shown == upright.shape[:2]
    assert np.abs(decoder.decode(data).astype(int) - upright).max() <= 1
    crop = decoder.decode(data, (5, 17, 30, 25)).astype(int)
    assert np.abs(crop - upright[5:35, 17:42]).max() <= 1
    ignoring = choose_decoder("auto", exif="ignore").decode(data)
    assert ignoring.shape == (61, 93, 3)


def test_grey_and_cmyk_jpegs_become_rgb(decoder, photo, encoded):
    grey, cmyk = encoded(photo(3).convert("L")), encoded(photo(3).convert("CMYK"))
    for data in (grey, cmyk):
        assert np.abs(decoder.decode(data).astype(int) - pillow_rgb(data)).max() <= 1
    assert read_header(cmyk).mode == "CMYK"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_png_modes_become_what_pillow_s_rgb_conversion_gives(decoder, photo, encoded, mode):
    image = photo(4).convert("RGB" if mode in ("LA", "RGBA") else mode)
    if mode in ("LA", "RGBA"):
        image = image.convert(mode)
        image.putalpha(100)
    data = encoded(image, "PNG")
    assert (decoder.decode(data) == pillow_rgb(data)).all()


def test_palette_with_transparency_drops_the_transparency(decoder, photo, encoded):
    data = encoded(photo(4).convert("P"), "PNG", transparency=3)
    assert decoder.decode(data).shape == (60, 80, 3)


def test_16_bit_grey_keeps_its_shades(decoder, encoded):
    ramp = (np.arange(60 * 80, dtype=np.uint16) * 13).reshape(60, 80)
    data = encoded(Image.fromarray(ramp), "PNG")
    assert (decoder.decode(data)[..., 1] == ramp >> 8).all()


def test_16_bit_rgb_png_keeps_the_high_byte(decoder):
    values = (np.arange(5 * 7 * 3) * 517 % 65536).reshape(5, 7, 3).astype(">u2")
    rows = b"".join(b"\x00" + row.tobytes() for row in values)

    head = struct.pack(">IIBBBBB", 7, 5, 16, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", head)
        + png_chunk(b"IDAT", zlib.compress(rows))
        + png_chunk(b"IEND", b"")
    )
    assert (decoder.decode(data) == (values >> 8)).all()


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("JPEG", "PNG")])
def test_other_formats_and_first_frames(decoder, photo, encoded, kind):
    options = {"save_all": True, "append_images": [photo(6)]} if kind in ("GIF", "TIFF", "AVIF") else {}
    data = encoded(photo(5), kind, **options)
    assert (decoder.decode(data) == pillow_rgb(data)).all()
    assert read_header(data).format in ("BMP" if kind == "DIB" else kind, kind)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_a_cut_file_is_refused_in_words(photo, encoded, kind):
    data = encoded(photo(5), kind)
    with pytest.raises(BadImageError, match="truncated|cannot be decoded|decoder error") as raised:
        choose_decoder("auto").decode(data[: len(data) // 2])
    assert "Error:" not in str(raised.value)


@pytest.mark.parametrize("kind", ["TIFF", "AVIF", "WEBP", "PNG"])
def test_orientation_is_undone_once_in_every_format_that_has_one(photo, encoded, kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photo(2, 61, 93), kind, exif=exif, lossless=True)
    with Image.open(io.BytesIO(data)) as image:
        upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert upright.shape == (93, 61, 3)
    assert (choose_decoder("auto").decode(data, (5, 17, 30, 25)) == upright[5:35, 17:42]).all()


def test_a_tiff_of_16_bits_keeps_its_shades_and_one_without_a_range_is_refused(encoded):
    ramp = (np.arange(60 * 80, dtype=np.uint16) * 13).reshape(60, 80)
    decoder = choose_decoder("auto")
    assert (decoder.decode(encoded(Image.fromarray(ramp), "TIFF"))[..., 1] == ramp >> 8).all()
    for values, stored in ((ramp.astype(np.float32), "floating-point"), (ramp.astype(np.int32), "32-bit")):
        with pytest.raises(BadImageError, match=f"{stored} pixels, whose range is not known"):
            decoder.decode(encoded(Image.fromarray(values), "TIFF"))


def test_an_image_that_only_a_newer_pillow_reads_says_so(photo, encoded, monkeypatch):
    data = encoded(photo(1), "AVIF")
    monkeypatch.setattr(image_header, "formats_here", lambda: ("JPEG", "PNG"))
    with pytest.raises(BadImageError, match=r"not an image of a format that this Pillow reads \(JPEG, PNG\)"):
        read_header(data)


@pytest.mark.parametrize("damage", ["empty", "cut", "half", "noise", "text"])
def test_damaged_files_are_bad_images(decoder, photo, encoded, damage):
    whole = encoded(photo(7, 200, 200))
    noisy = bytearray(whole)
    noisy[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)
    data = {
        "empty": b"",
        "cut": whole[:100],
        "half": whole[: len(whole) // 2],
        "noise": bytes(noisy),
        "text": b"<html>404 not found</html>",
    }[damage]
    with pytest.raises(BadImageError):
        decoder.decode(data)


def declare_size(data, height, width):
    """Rewrite the size in a JPEG's frame header."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def test_threads_that_decode_leave_the_warnings_of_others_alone(photo, encoded):
    """`catch_warnings` in eight threads at once left the process without any warnings."""
    data, decoder = encoded(photo(1, 40, 40), "PNG"), choose_decoder()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: decoder.decode(data), range(1000)))
    # Every warning is an error in these tests, as long as the filters are as they were.
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


def test_bombs_are_refused_before_they_are_decoded(decoder, photo, encoded):
    with pytest.raises(BadImageError, match="65000x65000"):
        decoder.decode(declare_size(encoded(photo(8)), 65000, 65000))
    huge = Image.new("1", (30_000, 5_000))
    with pytest.raises(BadImageError, match="30000x5000"):
        decoder.decode(encoded(huge, "PNG"))
    with pytest.raises(BadImageError, match="0x60"):
        decoder.decode(declare_size(encoded(photo(8)), 60, 0))


def test_a_jpeg_with_thousands_of_scans_is_refused(decoder, photo, encoded):
    data = encoded(photo(9), progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(BadImageError, match="scans"):
        decoder.decode(data[:-2] + scan * 1000 + data[-2:])


def test_the_decoder_in_use_is_reported_and_an_impossible_choice_refused(monkeypatch):
    assert choose_decoder("auto").reason
    monkeypatch.setattr(
        "fathoms.data.images.decode.load_turbojpeg",
        lambda: (None, "libturbojpeg.so.0 is older than version 3"),
    )
    with pytest.raises(BackendError, match=r"older than version 3; pip install turbojpeg"):
        choose_decoder("turbojpeg")
    fallback = choose_decoder("auto")
    assert fallback.name == "simplejpeg"
    assert "older than version 3" in fallback.reason
    with pytest.raises(UnknownNameError, match="did you mean 'simplejpeg'"):
        choose_decoder("simplejpg")


def test_a_box_outside_the_image_is_a_programming_error(decoder, photo, encoded):
    with pytest.raises(ValueError, match="not inside 60x80"):
        decoder.decode(encoded(photo(1)), (0, 0, 61, 10))


def test_crop_decode_equals_full_decode_on_photographs(photograph_tar):
    if load_turbojpeg()[0] is None:
        pytest.skip(load_turbojpeg()[1])
    from fathoms.data import open_source

    source = open_source(photograph_tar(300, val=16), "val")
    crop, full = choose_decoder("turbojpeg"), choose_decoder("simplejpeg")
    rng = np.random.default_rng(0)
    for index in range(len(source)):
        data = source.read(index)
        height, width = crop.header(data).shown
        box = (int(rng.integers(0, height // 2)), int(rng.integers(0, width // 2)), height // 3, width // 3)
        assert (crop.decode(data, box) == full.decode(data, box)).all()


@pytest.mark.parametrize("region", [(0, 0, 0, 8), (0, 0, 16, 0), (0, 0, 16, -1)])
def test_an_empty_crop_writes_nothing(photo, encoded, region):
    """The library takes zero for the rest of the image, more than there is memory for."""
    library, reason = load_turbojpeg()
    if library is None:
        pytest.skip(reason)
    room = np.full(1 << 20, 7, np.uint8)
    with pytest.raises(BadImageError, match="empty"):
        library.decode_to(room.ctypes.data, encoded(photo(1)), region)
    assert (room == 7).all()
