"""Every reader finds the same images and labels, and refuses what it should not open."""

import gzip
import io
import os
import shutil
import struct
import tarfile
import zipfile
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from fathoms.cli.main import main
from fathoms.data import ArchiveError, DataError, list_splits, open_source
from fathoms.data.readiness import FileRow, notices, verify_manifest, write_manifest
from fathoms.data.sources import image_folder
from fathoms.data.sources.splits import detect
from fathoms.data.sources.tar_files import read_index


def test_a_folder_has_splits_classes_and_labels(photo_folder):
    assert list_splits(photo_folder) == ["train", "val"]
    train, val = open_source(photo_folder), open_source(photo_folder, "val")
    assert (len(train), len(val)) == (48, 13)
    assert train.classes == val.classes == ("ape", "bee", "cat")
    assert np.bincount(train.labels).tolist() == [16, 16, 16]
    assert train.where(0) == "train/ape/000.jpg"
    assert train.read(0) == (photo_folder / "train/ape/000.jpg").read_bytes()


def test_validation_is_found_under_its_other_name(photo_folder):
    (photo_folder / "val").rename(photo_folder / "validation")
    assert open_source(photo_folder, "val").split == "validation"


def test_validation_classes_are_numbered_by_the_training_split(photo_folder):
    for file in (photo_folder / "val/ape").iterdir():
        file.unlink()
    (photo_folder / "val/ape").rmdir()
    val = open_source(photo_folder, "val")
    assert val.classes == ("ape", "bee", "cat")
    assert set(val.labels) == {1, 2}
    (photo_folder / "val/bee").rename(photo_folder / "val/yak")
    with pytest.raises(DataError, match="class 'yak' is not among the training classes"):
        open_source(photo_folder, "val")


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_classes_that_are_all_numbers_are_in_the_order_of_their_values(tmp_path, packed):
    """ImageNet-V2's folders are 0 to 999: in text order bare weights would be scored against other classes."""
    root = tmp_path / "photos"
    for split, classes in (("train", range(11)), ("val", (10, 2))):
        for number in classes:
            (root / split / str(number)).mkdir(parents=True)
            Image.new("RGB", (9, 9), (number, 0, 0)).save(root / split / str(number) / "1.png")
    if packed:
        with tarfile.open(tmp_path / "photos.tar", "w") as archive:
            archive.add(root, arcname=".")
    path = tmp_path / "photos.tar" if packed else root
    train, val = open_source(path), open_source(path, "val")
    assert train.classes == val.classes == tuple(map(str, range(11)))
    assert [int(train.where(i).split("/")[-2]) for i in range(11)] == train.labels.tolist()
    assert sorted(val.labels) == [2, 10]
    assert "classes are numbers and are counted as such: 0, 1, 2, …, 10" in notices([train, val])
    if not packed:
        (root / "train/10").rename(root / "train/ten")
        (root / "val/10").rename(root / "val/ten")
        assert open_source(root).classes == (*map(str, range(10)), "ten")


def test_a_missing_split_is_an_error_not_the_whole_folder(photo_folder):
    with pytest.raises(DataError, match="there is no split 'test'; it has train, val"):
        open_source(photo_folder, "test")
    with pytest.raises(DataError, match="no such file or folder"):
        open_source(photo_folder / "nowhere")
    flat = open_source(photo_folder / "train", "all")
    assert len(flat) == 48
    with pytest.raises(DataError, match="no split 'train'; it has all"):
        open_source(photo_folder / "train", "train")


def test_a_class_name_that_would_garble_a_terminal_is_refused(photo_folder):
    (photo_folder / "train/ape").rename(photo_folder / "train/a\x1b[2Jpe")
    with pytest.raises(DataError, match="control characters"):
        open_source(photo_folder)


def test_fingerprints_change_with_names_sizes_and_labels(photo_folder):
    first = open_source(photo_folder).fingerprint()
    assert first == open_source(photo_folder).fingerprint()
    path = photo_folder / "train/ape/000.jpg"
    path.write_bytes(path.read_bytes() + b"x")
    second = open_source(photo_folder).fingerprint()
    path.rename(photo_folder / "train/bee/000x.jpg")
    third = open_source(photo_folder).fingerprint()
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("place", ["first", "last"])
def test_fingerprints_see_a_file_replaced_by_another_of_its_size_and_no_copy(photo_folder, tmp_path, place):
    first = open_source(photo_folder).fingerprint()
    shutil.copytree(photo_folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert open_source(tmp_path / "copy").fingerprint() == first
    path = photo_folder / "train/ape/000.jpg"
    data = path.read_bytes()
    path.write_bytes(b"x" + data[1:] if place == "first" else data[:-1] + b"x")
    assert open_source(photo_folder).fingerprint() != first


def test_fingerprints_of_tar_files_see_a_replaced_image_too(photo_folder, tmp_path):
    found = []
    for name in ("one", "two"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(photo_folder, arcname=".")
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.tar").rename(tmp_path / name / "photos.tar")
        found.append(open_source(tmp_path / name / "photos.tar").fingerprint())
        path = photo_folder / "train/ape/000.jpg"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert found[0] != found[1]


def test_the_fingerprint_of_many_files_is_kept_until_one_of_them_changes(photo_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few = open_source(photo_folder).fingerprint()
    monkeypatch.setattr(image_folder, "MANY", 1)
    monkeypatch.setattr(image_folder, "_SETTLED", 0)
    assert open_source(photo_folder).fingerprint() == few
    with monkeypatch.context() as unread:
        unread.setattr(image_folder, "edges_at", None)
        assert open_source(photo_folder).fingerprint() == few
    path = photo_folder / "train/ape/000.jpg"
    times = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_source(photo_folder).fingerprint() != few


def test_a_fingerprint_counts_what_cannot_be_read_and_does_not_wait_for_a_pipe(photo_folder):
    first = open_source(photo_folder).fingerprint()
    path = photo_folder / "train/ape/000.jpg"
    path.unlink()
    os.mkfifo(path)
    assert open_source(photo_folder).fingerprint() != first


def test_a_manifest_names_the_file_that_changed(photo_folder, tmp_path):
    source = open_source(photo_folder)
    rows = [
        FileRow(source.where(i), source.size(i), int(source.labels[i]), sha256(source.read(i)).hexdigest())
        for i in range(len(source))
    ]
    facts = {"classes": list(source.classes), "fingerprint": source.fingerprint(), "count": len(source)}
    write_manifest(tmp_path / "m.json", {"train": facts}, {"train": rows})
    assert verify_manifest(tmp_path / "m.json", source)["count"] == 48
    path = photo_folder / "train/bee/001.jpg"
    # By another of its size, and by a longer one.
    for data in (path.read_bytes()[:-1] + b"x", path.read_bytes() + b"x"):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"train/bee/001\.jpg changed since the check"):
            verify_manifest(tmp_path / "m.json", open_source(photo_folder))
    path.unlink()
    with pytest.raises(DataError, match=r"train/bee/001\.jpg disappeared"):
        verify_manifest(tmp_path / "m.json", open_source(photo_folder))
    with pytest.raises(DataError, match="has no split 'val'"):
        verify_manifest(tmp_path / "m.json", open_source(photo_folder, "val"))


def test_a_folder_inside_a_tar_equals_the_folder(photo_folder, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(photo_folder, arcname=".")
    path = tmp_path / "photos.tar"
    assert detect(path) == "tar-folder"
    inside, outside = open_source(path, "val"), open_source(photo_folder, "val")
    assert inside.classes == outside.classes
    assert (inside.labels == outside.labels).all()
    assert [inside.read(i) for i in range(13)] == [outside.read(i) for i in range(13)]


def test_webdataset_shards_are_read_in_place(make_tar, tmp_path, photo, encoded):
    for shard in range(2):
        entries = []
        for i in range(5):
            entries += [(f"{shard}{i}.jpg", encoded(photo(i))), (f"{shard}{i}.cls", str(i % 3).encode())]
            entries += [(f"{shard}{i}.json", b"{}")]
        make_tar(f"train-{shard:06d}.tar", entries)
    source = open_source(tmp_path)
    assert source.kind == "webdataset"
    assert (len(source), source.classes) == (10, ("0", "1", "2"))
    assert source.read(7) == encoded(photo(2))
    assert source.where(7) == "train-000001.tar!12.jpg"
    with pytest.raises(DataError, match="no shards of split 'val'"):
        open_source(tmp_path, "val")


@pytest.mark.parametrize("label", [b"__import__('os')", b"5" + 31 * b" " + b"7", b"", b"1 2"])
def test_a_webdataset_label_is_a_number_and_nothing_else(make_tar, photo, encoded, label):
    path = make_tar("train-000000.tar", [("a.jpg", encoded(photo(0))), ("a.cls", label)])
    with pytest.raises(ArchiveError, match="write a number"):
        open_source(path, kind="webdataset")


def link(name, kind, target="/etc/passwd"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("../train/a/1.jpg", "points outside"),
        ("/etc/1.jpg", "points outside"),
        ("train/a/../../../1.jpg", "points outside"),
        ("C:\\a\\1.jpg", "points outside"),
        ("train/a/\x1b[2J.jpg", "control characters"),
        (link("train/a/1.jpg", tarfile.SYMTYPE), "is a link"),
        (link("train/a/1.jpg", tarfile.LNKTYPE), "is a link"),
        (link("train/a/1.jpg", tarfile.CHRTYPE), "not a plain file"),
        (link("train/a/1.jpg", tarfile.FIFOTYPE), "not a plain file"),
        ("train/a/0.jpg", "occurs twice"),
        ("./train/a/0.jpg", "occurs twice"),
    ],
    ids=[
        "up",
        "root",
        "up again",
        "drive",
        "escape",
        "symlink",
        "hard link",
        "device",
        "pipe",
        "twice",
        "twice, dotted",
    ],
)
def test_hostile_archives_are_refused_and_write_nothing(make_tar, tmp_path, photo, encoded, entry, complaint):
    data = None if isinstance(entry, tarfile.TarInfo) else b"x"
    path = make_tar("bad.tar", [("train/a/0.jpg", encoded(photo(0))), (entry, data)])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArchiveError, match=complaint):
        open_source(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_archives_are_refused(make_tar, tmp_path, photo, encoded):
    entries = [(f"train/a/{i}.jpg", encoded(photo(i))) for i in range(6)]
    whole = make_tar("good.tar", entries)
    assert len(read_index(whole)) == 6
    data = bytearray(whole.read_bytes())
    third = read_index(whole)[3].offset - 512
    cut, broken = tmp_path / "cut.tar", tmp_path / "broken.tar"
    cut.write_bytes(data[: third + 700])
    with pytest.raises(ArchiveError, match=r"cut off|not a readable"):
        read_index(cut)
    data[third : third + 512] = b"\xaa" * 512
    broken.write_bytes(data)
    with pytest.raises(ArchiveError, match=f"damaged header at byte {third}"):
        read_index(broken)
    packed = tmp_path / "packed.tar"
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    with pytest.raises(ArchiveError, match="uncompressed tar"):
        read_index(packed)


def arrays(count=20, side=8):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8), np.arange(count) % 4


def test_npz_arrays_with_and_without_names(tmp_path):
    x, y = arrays()
    path = tmp_path / "set.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:5], y_test=y[:5], classes=np.array(["a", "b", "c", "d"]))
    train, val = open_source(path), open_source(path, "val")
    assert (train.images == x).all()
    assert (len(val), val.split, val.classes) == (5, "test", ("a", "b", "c", "d"))
    np.savez(path, x_train=x[..., 0], y_train=y)
    assert open_source(path).images.shape == (20, 8, 8, 3)
    np.savez(path, x_train=x / 255, y_train=y)
    with pytest.raises(DataError, match="float64, not uint8"):
        open_source(path)
    with pytest.raises(DataError, match="no x_val"):
        open_source(path, "val")


def test_an_npz_in_any_order_and_byte_order_is_read_as_numpy_reads_it(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    labels = np.array([0, 1, 1, 0], ">i4")
    for name, save in (("plain", np.savez), ("packed", np.savez_compressed)):
        path = tmp_path / f"{name}.npz"
        save(path, x_train=np.asfortranarray(pixels), y_train=labels)
        source = open_source(path)
        assert np.array_equal(source.images, pixels)
        assert source.labels.tolist() == [0, 1, 1, 0]


def test_an_npz_whose_content_is_ambiguous_or_empty_is_refused(tmp_path):
    pixels, labels = np.zeros((4, 6, 5, 3), np.uint8), np.array([0, 1, 1, 0])
    np.savez(tmp_path / "flat.npz", x_train=pixels[:, :0], y_train=labels)
    with pytest.raises(DataError, match="have no pixels"):
        open_source(tmp_path / "flat.npz")
    np.savez(tmp_path / "names.npz", x_train=pixels, y_train=labels, classes=np.array(["a", "a"]))
    with pytest.raises(DataError, match="two classes are called 'a'"):
        open_source(tmp_path / "names.npz")
    np.savez(tmp_path / "square.npz", x_train=pixels, y_train=labels, classes=np.array([["a", "b"]]))
    with pytest.raises(DataError, match=r"classes has shape \(1, 2\)"):
        open_source(tmp_path / "square.npz")
    np.savez(tmp_path / "twice.npz", x_train=pixels, y_train=labels)
    with zipfile.ZipFile(tmp_path / "twice.npz", "a") as archive, archive.open("y_train", "w") as member:
        np.lib.format.write_array(member, labels[::-1].copy())
    with pytest.raises(DataError, match="two arrays called y_train"):
        open_source(tmp_path / "twice.npz")


def test_an_npz_with_a_pickle_inside_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "sentinel"), "w"))

    path = tmp_path / "evil.npz"
    np.savez(path, x_train=np.array([Evil()], dtype=object), y_train=np.zeros(1, np.int64))
    (tmp_path / "sentinel").unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"not a plain \.npz"):
        open_source(path)
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize("gz", [False, True])
def test_idx_files_plain_and_gzipped(tmp_path, gz):
    x, y = arrays()
    for prefix, count in (("train", 20), ("t10k", 6)):
        images = struct.pack(">IIII", 0x803, count, 8, 8) + x[:count, ..., 0].tobytes()
        labels = struct.pack(">II", 0x801, count) + y[:count].astype(np.uint8).tobytes()
        for name, data in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            path = tmp_path / (f"{name}.gz" if gz else name)
            path.write_bytes(gzip.compress(data) if gz else data)
    train, val = open_source(tmp_path), open_source(tmp_path, "val")
    assert (train.kind, len(train), len(val)) == ("idx", 20, 6)
    assert (train.images[..., 1] == x[..., 0]).all()
    path.write_bytes(gzip.compress(data[:-1]) if gz else data[:-1])
    with pytest.raises(DataError, match="do not hold"):
        open_source(tmp_path, "val")


def test_a_hugging_face_data_set_hands_over_the_stored_bytes(tmp_path, photo, encoded):
    datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    files = [encoded(photo(i)) for i in range(6)]
    features = datasets.Features(
        {"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"photo": [{"bytes": f, "path": None} for f in files], "kind": [0, 1] * 3}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "validation": table.select([1])}).save_to_disk(str(tmp_path / "hf"))
    source = open_source(tmp_path / "hf")
    assert (source.kind, len(source), source.classes) == ("hub", 6, ("no", "yes"))
    assert [source.read(i) for i in range(6)] == files
    assert open_source(tmp_path / "hf", "val").split == "validation"
    assert source.fingerprint() == open_source(tmp_path / "hf").fingerprint()


def test_a_row_without_an_image_is_one_bad_image(tmp_path, photo, encoded, capsys):
    datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"image": [{"bytes": encoded(photo(0)), "path": None}, None], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "hf"))
    capsys.readouterr()
    assert main(["data", "check", str(tmp_path / "hf"), "--manifest", str(tmp_path / "m.json")]) == 1
    assert "BAD 'all[1]': cannot be read (the row holds no image)" in capsys.readouterr().out


def test_a_file_that_is_no_data_set_is_refused(tmp_path):
    (tmp_path / "data.pkl").write_bytes(b"\x80\x04N.")
    with pytest.raises(DataError, match=r"neither \.tar nor \.npz"):
        open_source(tmp_path / "data.pkl")
    (tmp_path / "broken.npz").write_bytes(io.BytesIO(b"PK\x03\x04nonsense").getvalue())
    with pytest.raises(DataError, match=r"not a plain \.npz"):
        open_source(tmp_path / "broken.npz")


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_index_of_every_tar_format_is_complete(tmp_path, layout):
    # Names beyond 100 letters are stored differently in each format.
    names = [f"train/{'long' * (1 + i % 3 * 15)}/{i}.jpg" for i in range(7)]
    path = tmp_path / "images.tar"
    with tarfile.open(path, "w", format=layout) as archive:
        folder = tarfile.TarInfo("train")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for i, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 600 * i
            archive.addfile(info, io.BytesIO(bytes([i]) * info.size))
    members = read_index(path)
    assert [member.name for member in members] == names
    data = path.read_bytes()
    for i, member in enumerate(members):
        assert data[member.offset : member.offset + member.size] == bytes([i]) * 600 * i


def test_a_hub_out_of_reach_is_one_line_at_once(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("fathoms.machine.reachable", lambda *_: False)
    seen = []

    def load(name):
        seen.append((name, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("retried for minutes")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match="^hfds/mnist: the Hub cannot be reached, and the local cache"):
        open_source("hfds/mnist")
    assert seen == [("mnist", True)]
    assert not datasets.config.HF_HUB_OFFLINE
