"""The contract of every data source. A new kind gets these tests by being registered, once `MAKERS` can make one."""

from __future__ import annotations

import numpy as np
import pytest

from fathoms.data import ArraySource, DataError, Source, choose_decoder, list_splits, open_source
from fathoms.data.sources.arrays import digit_sources
from fathoms.data.sources.splits import READERS, detect
from fathoms.errors import UnknownNameError
from tiny_data import LABELS, MAKERS, SIDE, pixels_of


@pytest.fixture(scope="module", params=list(READERS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def path(kind, tmp_path_factory):
    """A data set of this kind: six training images of three classes and three held-out ones. No test changes it."""
    return MAKERS[kind](tmp_path_factory.mktemp("data"))


@pytest.fixture(params=["train", "val"])
def source(path, request):
    return open_source(path, request.param)


def pixels(source, index: int) -> np.ndarray:
    if isinstance(source, ArraySource):
        return source.images[index]
    return choose_decoder("auto").decode(source.read(index))


def test_is_recognised_by_its_path(kind, path):
    assert detect(path) == kind
    assert open_source(path).fingerprint() == open_source(path, kind=kind).fingerprint()


def test_is_a_source_of_files_or_of_arrays(source):
    assert isinstance(source, ArraySource | Source)


def test_counts_its_images(source, request):
    split = request.node.callspec.params["source"]
    assert len(source) == len(source.labels) == len(LABELS[split])


def test_labels_are_whole_numbers_of_its_classes(source, request):
    split = request.node.callspec.params["source"]
    assert source.labels.dtype == np.int64
    assert sorted(source.labels.tolist()) == sorted(LABELS[split])
    assert isinstance(source.classes, tuple)
    assert len(source.classes) == 3
    # IDX files hold numbers and no names.
    assert source.classes == (("0", "1", "2") if source.kind == "idx" else ("a", "b", "c"))


def test_every_image_keeps_its_label_and_its_pixels(source, request):
    split = request.node.callspec.params["source"]
    expected = {
        (label, image[..., :1].repeat(3, axis=2).tobytes() if source.kind == "idx" else image.tobytes())
        for label, image in zip(LABELS[split], pixels_of(split), strict=True)
    }
    found = [(int(source.labels[i]), pixels(source, i)) for i in range(len(source))]
    if source.kind == "pack":
        # Packing encodes again, with losses: the image is the nearest one, and has the right label.
        originals = {label: [] for label in range(3)}
        for label, image in zip(LABELS[split], pixels_of(split), strict=True):
            originals[label].append(image.astype(int))
        for label, image in found:
            nearest = {k: min(np.abs(image - other).mean() for other in v) for k, v in originals.items()}
            assert min(nearest, key=nearest.get) == label
    else:
        assert {(label, image.tobytes()) for label, image in found} == expected


def test_reading_twice_gives_the_same_bytes(source):
    for index in range(len(source)):
        if isinstance(source, ArraySource):
            assert source.images[index].dtype == np.uint8
            assert source.images[index].shape == (SIDE, SIDE, 3)
        else:
            data = source.read(index)
            assert isinstance(data, bytes)
            assert data == source.read(index)
            assert source.size(index) == len(data)


def test_every_image_has_a_name_of_its_own(source):
    names = [source.where(index) for index in range(len(source))]
    assert len(set(names)) == len(source)
    assert all(name.isprintable() for name in names)


def test_the_fingerprint_is_stable_and_tells_splits_apart(path):
    train, val = open_source(path), open_source(path, "val")
    assert train.fingerprint() == open_source(path).fingerprint()
    assert train.fingerprint() != val.fingerprint()


def test_every_listed_split_opens_and_training_comes_first(path):
    splits = list_splits(path)
    assert len(splits) == 2
    assert splits[0] == "train"
    assert [open_source(path, split).split for split in splits] == splits


def test_a_split_that_is_not_there_is_refused_by_name(path):
    with pytest.raises(DataError, match="nonsense"):
        open_source(path, "nonsense")


def test_what_is_not_there_is_refused(kind, tmp_path):
    with pytest.raises((DataError, OSError)):
        open_source(tmp_path / "nowhere", kind=kind)


def test_a_kind_that_does_not_exist_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'folder'"):
        list_splits(tmp_path, "foldr")


def test_the_built_in_digits_are_a_source_too():
    for source in digit_sources():
        assert isinstance(source, ArraySource)
        assert source.images.shape == (len(source), 8, 8, 3)
        assert set(source.labels.tolist()) == set(range(10))
    train, test = (source.fingerprint() for source in digit_sources())
    assert (train, test) == tuple(source.fingerprint() for source in digit_sources())
    assert train != test
