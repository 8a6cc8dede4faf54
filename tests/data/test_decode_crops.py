"""Crops of a few samples: decoded in place or one by one, they have the same pixels."""

import numpy as np
import pytest
from PIL import Image

from fathoms.data import CropOptions, choose_decoder, open_source
from fathoms.data.images.crops import SampleReader, decode_crops
from fathoms.data.sampler import Refs
from fathoms.data.workers import own_memory
from fathoms.errors import BackendError

SIZE = 32


@pytest.fixture
def mixed_folder(tmp_path, photo, encoded):
    """Upright, rotated, grey, damaged and large images, and some that are not JPEGs."""
    turned = Image.Exif()
    turned[0x0112] = 6
    (tmp_path / "train/all").mkdir(parents=True)
    for number in range(24):
        image = photo(number, 60 + number, 90 - number)
        data = {
            0: lambda p: encoded(p),
            1: lambda p: encoded(p.convert("L")),
            2: lambda p: encoded(p, exif=turned),
            3: lambda p: encoded(p, "PNG"),
            4: lambda p: encoded(p.resize((400, 300))),
            5: lambda p: encoded(p)[:-200] + bytes(200),
        }[number % 6](image)
        (tmp_path / f"train/all/{number:02d}.jpg").write_bytes(data)
    return open_source(tmp_path)


def cut(pixels, layout):
    """Every image of a pixel buffer as an array of its own."""
    flat = pixels.numpy()
    for offset, pitch, (height, width) in zip(layout.offset, layout.pitch, layout.size, strict=True):
        rows = offset + pitch * np.arange(height)[:, None] + np.arange(width)
        yield flat[rows]


@pytest.mark.parametrize("mode", ["resized", "pad"])
def test_crops_decoded_in_place_are_those_decoded_one_by_one(mixed_folder, mode):
    try:
        decoders = [choose_decoder("turbojpeg"), choose_decoder("simplejpeg")]
    except BackendError as error:
        pytest.skip(str(error))
    # The control: one of the two does decode in place, and the other does not.
    header = decoders[0].header(mixed_folder.read(0))
    assert [decoder.in_place(header) for decoder in decoders] == [True, False]
    index = np.arange(24)
    found, bad = [], []
    for decoder in decoders:
        names: set[str] = set()
        reader = SampleReader(
            mixed_folder, decoder, lambda _: None, lambda name, _, names=names: names.add(name)
        )
        indices, pixels, layout = decode_crops(
            reader,
            Refs(index, index * 0, index),
            0,
            0,
            CropOptions(mode),
            SIZE,
            own_memory(pin=False),
            resized=False,
        )
        found.append((indices, layout, list(cut(pixels, layout))))
        bad.append(names)
    # Crop decode does not see damage below the crop, so it may keep an image that a full decode refuses.
    assert bad[0] <= bad[1]
    assert bad[0]
    same = [a == b for a, b in zip(found[0][0], found[1][0], strict=True)]
    assert sum(same) >= 20
    for slot in np.flatnonzero(same):
        assert (found[0][2][slot] == found[1][2][slot]).all()
        for name in ("size", "box", "flip", "cubic"):
            assert np.array_equal(getattr(found[0][1], name)[slot], getattr(found[1][1], name)[slot])
