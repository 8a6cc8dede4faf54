"""Duplicates are found whichever image comes first: pairs against brute force, and `fathoms data check` on files."""

import io
import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fathoms.cli.data_check import Args
from fathoms.cli.main import main
from fathoms.data import dataset_check
from fathoms.data.dataset_check import NEAR, near_pairs, perceptual_hash


def checked(folder, capsys):
    assert main(["data", "check", str(folder), "--json"]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_duplicates_are_found_within_and_across_splits(photo_folder, capsys, encoded):
    original = photo_folder / "train/ape/000.jpg"
    (photo_folder / "train/bee/copy.jpg").write_bytes(original.read_bytes())
    with Image.open(photo_folder / "train/cat/002.jpg") as image:
        larger = image.resize((image.width * 2, image.height * 2), Image.Resampling.BICUBIC)
    (photo_folder / "val/cat/leak.jpg").write_bytes(encoded(larger, quality=80))
    (photo_folder / "train/cat/blank1.png").write_bytes(encoded(Image.new("RGB", (40, 40), (9, 9, 9)), "PNG"))
    (photo_folder / "train/cat/blank2.png").write_bytes(encoded(Image.new("RGB", (40, 40), (8, 8, 8)), "PNG"))
    _, result = checked(photo_folder, capsys)
    assert result["exact_duplicates"] == [["train/ape/000.jpg", "train/bee/copy.jpg"]]
    assert [pair[:2] for pair in result["near_duplicates"]] == [["train/cat/002.jpg", "val/cat/leak.jpg"]]
    assert result["across_splits"] == [["train/cat/002.jpg", "val/cat/leak.jpg"]]


def test_the_command_takes_the_limit_of_the_library():
    assert Args("photos").near == NEAR


def within(hashes, limit):
    """Every pair within `limit` bits, one by one."""
    known = [(place, value) for place, value in enumerate(hashes) if value is not None]
    pairs = ((i, j, (a ^ b).bit_count()) for (i, a), (j, b) in itertools.combinations(known, 2))
    return [(i, j, bits) for i, j, bits in pairs if bits <= limit]


# A few bits of few places, so that hashes are often near and often the same.
_ALIKE = st.sets(st.sampled_from([0, 1, 12, 13, 31, 62, 63])).map(lambda bits: sum(1 << bit for bit in bits))


@given(st.lists(st.none() | _ALIKE, max_size=20), st.integers(0, 8))
def test_near_pairs_of_hashes_that_repeat_are_all_pairs_too(hashes, limit):
    assert near_pairs(hashes, limit) == within(hashes, limit)


def resaved(path, target, encoded, **options):
    """The same pixels in another file."""
    with Image.open(path) as image:
        target.write_bytes(encoded(image, "PNG", **options))


def test_a_leak_is_listed_though_an_image_before_it_has_its_hash(photo_folder, capsys, encoded):
    original = photo_folder / "train/ape/000.jpg"
    resaved(original, photo_folder / "train/ape/again.png", encoded)
    resaved(original, photo_folder / "val/ape/leak.png", encoded, compress_level=1)
    _, result = checked(photo_folder, capsys)
    train = ["train/ape/000.jpg", "train/ape/again.png"]
    assert result["across_splits"] == [[name, "val/ape/leak.png"] for name in train]
    assert [pair[:2] for pair in result["near_duplicates"]] == [train, *result["across_splits"]]


def test_of_a_crowd_some_are_listed_and_the_rest_are_counted(photo_folder, capsys, encoded, monkeypatch):
    monkeypatch.setattr(dataset_check, "CROWD", 2)
    original = photo_folder / "train/ape/000.jpg"
    for level in range(1, 5):
        resaved(original, photo_folder / f"train/ape/more{level}.png", encoded, compress_level=level)
    resaved(original, photo_folder / "val/ape/leak.png", encoded, compress_level=9)
    # A copy is an exact duplicate, and no part of the crowd.
    (photo_folder / "train/ape/copy.jpg").write_bytes(original.read_bytes())
    out, result = checked(photo_folder, capsys)
    assert len(result["near_duplicates"]) == 3
    assert [pair[1] for pair in result["across_splits"]] == ["val/ape/leak.png"] * 2
    assert "warning: 3 files not compared for near duplicates; 2 before them" in out


def test_the_hash_survives_shrinking_and_compression_but_not_another_image(photo):
    original = photo(1, 150, 200)
    buffer = io.BytesIO()
    original.resize((100, 75)).save(buffer, "JPEG", quality=40)
    first, again = perceptual_hash(np.asarray(original)), perceptual_hash(np.asarray(Image.open(buffer)))
    assert (first ^ again).bit_count() <= 4
    assert (first ^ perceptual_hash(np.asarray(photo(2, 150, 200)))).bit_count() > 12
