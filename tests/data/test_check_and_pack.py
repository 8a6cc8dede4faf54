"""`fathoms data check`, `pack` and `info`, through their run functions, on data with real faults."""

import json
import shutil
import tarfile

import numpy as np
import pytest
import tyro
from PIL import Image

from fathoms.cli import data_check, data_pack
from fathoms.cli.lists import DataInfo
from fathoms.data import DataError, choose_decoder, open_source
from fathoms.data.dataset_check import check_sources
from fathoms.data.packing import PackOptions, target_size, verify_pack
from fathoms.data.readiness import verify_manifest
from fathoms.errors import ConfigError, FathomsError
from tiny_data import MAKERS


def call(module, capsys, *words):
    code = module.run(tyro.cli(module.Args, args=[str(word) for word in words]))
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1]) if "--json" in words else None


def test_a_clean_folder_passes_and_its_manifest_verifies(photo_folder, capsys):
    code, out, result = call(data_check, capsys, photo_folder, "--json", "--workers", 2)
    assert code == 0
    assert result["files"] == 61
    assert (result["bad"], result["across_splits"]) == ([], [])
    assert result["modes"] == {"JPEG RGB": 61}
    assert "decoder in use: " in out
    facts = verify_manifest(result["manifest"], open_source(photo_folder))
    assert (facts["count"], facts["classes"]) == (48, ["ape", "bee", "cat"])
    (photo_folder / "train/ape/new.jpg").write_bytes((photo_folder / "train/ape/000.jpg").read_bytes())
    with pytest.raises(DataError, match=r"train/ape/new\.jpg was added since the check"):
        verify_manifest(result["manifest"], open_source(photo_folder))


def test_a_check_replaces_its_own_manifest_and_no_other_file(photo_folder, capsys, tmp_path):
    call(data_check, capsys, photo_folder)
    assert call(data_check, capsys, photo_folder)[0] == 0
    words = (photo_folder, "--manifest", tmp_path / "m.json")
    call(data_check, capsys, *words)
    with pytest.raises(FathomsError, match=r"m\.json: is there already; .*--overwrite"):
        call(data_check, capsys, *words)
    assert call(data_check, capsys, *words, "--overwrite")[0] == 0
    (photo_folder / "fathoms-manifest.json").write_text("mine")
    with pytest.raises(FathomsError, match=r"fathoms-manifest\.json: is there already"):
        call(data_check, capsys, photo_folder)


def test_every_bad_file_is_named_with_its_reason(photo_folder, capsys, photo, encoded):
    good = encoded(photo(3, 200, 200))
    folder = photo_folder / "train/cat"
    huge = good.index(b"\xff\xc0") + 5
    faults = {
        "zero.jpg": b"",
        "cut.jpg": good[: len(good) - 200],
        "header.jpg": good[:60],
        "text.jpg": b"<html></html>",
        "bomb.jpg": good[:huge] + b"\xff\xff\xff\xff" + good[huge + 4 :],
        "bomb.png": encoded(Image.new("1", (20_000, 9_000)), "PNG"),
    }
    for name, data in faults.items():
        (folder / name).write_bytes(data)
    odd = {"rgba.png": "RGBA", "grey.png": "L", "palette.png": "P"}
    for number, (name, mode) in enumerate(odd.items()):
        (folder / name).write_bytes(encoded(photo(70 + number).convert(mode), "PNG"))
    code, out, result = call(data_check, capsys, photo_folder, "--json")
    assert code == 1
    assert {entry["name"] for entry in result["bad"]} == {f"train/cat/{name}" for name in faults}
    assert all(entry["problem"] for entry in result["bad"])
    assert "BAD 'train/cat/zero.jpg': the file is empty" in out
    assert "BAD 'train/cat/bomb.jpg': it declares 65535x65535 pixels" in out
    assert "BAD 'train/cat/bomb.png': it declares too many pixels" in out
    assert {"PNG RGBA", "PNG L", "PNG P"} <= set(result["modes"])
    facts = verify_manifest(result["manifest"], open_source(photo_folder))
    assert len(facts["bad"]) == 6
    # They may be removed; a good file may not.
    for name in faults:
        (folder / name).unlink()
    assert len(verify_manifest(result["manifest"], open_source(photo_folder))["bad"]) == 6
    (folder / "grey.png").unlink()
    with pytest.raises(DataError, match=r"train/cat/grey\.png disappeared"):
        verify_manifest(result["manifest"], open_source(photo_folder))


def test_a_link_that_leads_nowhere_is_a_bad_file_among_good_ones(photo_folder, capsys):
    (photo_folder / "train/cat/gone.jpg").symlink_to("nowhere.jpg")
    code, out, result = call(data_check, capsys, photo_folder, "--json")
    assert (code, [bad["name"] for bad in result["bad"]]) == (1, ["train/cat/gone.jpg"])
    assert "BAD 'train/cat/gone.jpg': " in out
    assert call(DataInfo, capsys, photo_folder)[0] == 0


def test_arrays_are_checked_as_files_are(photo_folder, tmp_path, capsys, photo):
    x = np.stack([np.asarray(photo(seed)) for seed in range(10)])
    leaks = np.stack([x[0], x[1] // 2])
    labels = np.arange(10) % 2
    np.savez(tmp_path / "set.npz", x_train=x, y_train=labels, x_test=leaks, y_test=[0, 0])
    code, out, result = call(data_check, capsys, tmp_path / "set.npz", "--json")
    assert code == 0
    assert result["across_splits"] == [["train[0]", "test[0]"], ["train[1]", "test[1]"]]
    assert [pair[:2] for pair in result["near_duplicates"]] == result["across_splits"][1:]
    assert (result["classes"], result["smallest_class"]) == ({"train": 2, "test": 2}, {"train": 5, "test": 0})
    assert result["empty_classes"] == {"train": [], "test": ["1"]}
    assert "0 bad of 12 images; manifest: " in out
    assert verify_manifest(result["manifest"], open_source(tmp_path / "set.npz"))["count"] == 10
    assert result.keys() == call(data_check, capsys, photo_folder, "--json")[2].keys()
    assert call(data_check, capsys, tmp_path / "set.npz", "--json", "--near", -1)[2]["near_duplicates"] == []


def test_a_pack_holds_every_good_image_smaller_and_the_bad_ones_by_name(photo_folder, tmp_path, capsys):
    (photo_folder / "train/ape/000.jpg").write_bytes(b"")
    target = tmp_path / "packed"
    words = (photo_folder, target, "--max-side", 40, "--shard-samples", 20, "--workers", 2, "--json")
    code, out, result = call(data_pack, capsys, *words)
    assert code == 1
    assert [entry["name"] for entry in result["left_out"]] == ["train/ape/000.jpg"]
    assert (result["samples"], result["shards_written"]) == (60, 4)
    assert "LEFT OUT 'train/ape/000.jpg': the file is empty" in out
    pack, original = open_source(target), open_source(photo_folder)
    assert (pack.kind, len(pack), pack.classes) == ("pack", 47, original.classes)
    decoder = choose_decoder()
    assert max(max(decoder.header(pack.read(i)).shown) for i in range(47)) == 40
    assert np.bincount(pack.labels).tolist() == [15, 16, 16]
    assert verify_pack(target) == []
    # The shards are WebDataset without the index, with the same images and labels.
    plain = open_source(target, kind="webdataset")
    assert plain.classes == pack.classes
    assert [plain.read(i) for i in range(47)] == [pack.read(i) for i in range(47)]
    assert (plain.labels == pack.labels).all()


def test_a_pack_larger_than_its_source_gets_a_remark(photo_folder, tmp_path, capsys):
    for path in photo_folder.rglob("*.jpg"):
        with Image.open(path) as image:
            image.convert("RGB").resize((16, 16)).save(path.with_suffix(".webp"), quality=1)
        path.unlink()
    _, out, result = call(data_pack, capsys, photo_folder, tmp_path / "packed", "--json")
    assert result["bytes_out"] > result["bytes_in"]
    assert "train: the pack is larger than its source; a lower --quality" in out


def test_packing_keeps_the_image(photo_folder, tmp_path, capsys):
    call(data_pack, capsys, photo_folder, tmp_path / "packed")
    pack, original = open_source(tmp_path / "packed", "val"), open_source(photo_folder, "val")
    decoder = choose_decoder()
    by_number = {int(pack.where(i).split("!")[1][:9]): i for i in range(len(pack))}
    for number in range(len(original)):
        before = decoder.decode(original.read(number)).astype(int)
        after = decoder.decode(pack.read(by_number[number])).astype(int)
        # Quality 90 with colour at half resolution: about two levels on average.
        assert np.abs(before - after).mean() < 4
        assert pack.labels[by_number[number]] == original.labels[number]


def test_an_interrupted_pack_resumes_where_it_stopped(photo_folder, tmp_path, capsys):
    target = tmp_path / "packed"
    words = (photo_folder, target, "--shard-samples", 10, "--json")
    call(data_pack, capsys, *words)
    whole = {path.name: path.read_bytes() for path in target.iterdir()}
    # As after a kill: a table whose shard was not renamed yet, one never begun, half a shard, no index.
    (target / "train-000003.tar").unlink()
    (target / "val-000001.tar").unlink()
    (target / "val-000001.json").unlink()
    (target / ".train-000004.tar.tmp").write_bytes(b"half a shard")
    (target / "index.json").unlink()
    with pytest.raises(DataError):
        open_source(target, kind="pack")
    _, _, result = call(data_pack, capsys, *words)
    assert (result["shards_written"], result["shards_kept"]) == (2, 5)
    again = {path.name: path.read_bytes() for path in target.iterdir() if not path.name.startswith(".")}
    assert again == whole


def test_other_options_or_other_data_are_packed_anew(photo_folder, tmp_path, capsys):
    target = tmp_path / "packed"
    call(data_pack, capsys, photo_folder, target)
    words = (photo_folder, target, "--json", "--quality", 80, "--overwrite")
    assert call(data_pack, capsys, *words)[2]["shards_written"] == 2
    (photo_folder / "train/ape/000.jpg").unlink()
    result = call(data_pack, capsys, *words)[2]
    assert (result["shards_written"], result["shards_kept"]) == (1, 1)


def test_a_file_replaced_by_another_of_its_size_is_packed_anew(photo_folder, tmp_path, capsys):
    target = tmp_path / "packed"
    call(data_pack, capsys, photo_folder, target)
    path = photo_folder / "train/ape/000.jpg"
    path.write_bytes(path.read_bytes()[:-3] + b"\x00\xff\xd9")
    with pytest.raises(DataError, match=r"index\.json: is there already, of other data .*--overwrite"):
        call(data_pack, capsys, photo_folder, target)
    result = call(data_pack, capsys, photo_folder, target, "--json", "--overwrite")[2]
    assert (result["shards_written"], result["shards_kept"]) == (1, 1)


def test_packing_replaces_only_what_is_left_of_the_same_pack(photo_folder, tmp_path, capsys):
    target = tmp_path / "packed"
    call(data_pack, capsys, photo_folder, target)
    whole = {path.name: path.read_bytes() for path in target.iterdir()}
    for name in ("train-000000.tar", "classes.txt", "index.json"):
        (target / name).write_bytes(b"{}")
        # Of a shard, the table says that it belongs to this pack: what lies there is a damaged shard.
        if name.endswith(".tar"):
            (target / "train-000000.json").unlink()
        with pytest.raises(DataError, match=rf"{name}: is there already"):
            call(data_pack, capsys, photo_folder, target)
        assert (target / name).read_bytes() == b"{}"
        call(data_pack, capsys, photo_folder, target, "--overwrite")
        assert {path.name: path.read_bytes() for path in target.iterdir()} == whole
    with pytest.raises(DataError, match="is a file, not a folder"):
        call(data_pack, capsys, photo_folder, target / "classes.txt")


def test_overwriting_removes_shards_that_the_new_pack_does_not_have(photo_folder, tmp_path, capsys):
    target = tmp_path / "packed"
    call(data_pack, capsys, photo_folder, target, "--shard-samples", 10)
    mine = {"mine-000000.tar": b"x", "mine-000000.json": b"{}", "train-000077.tar": b"x", "a-b.json": b"{}"}
    for name, data in mine.items():
        (target / name).write_bytes(data)
    # As after a kill while the shard was replaced.
    (target / "val-000001.tar").unlink()
    shutil.rmtree(photo_folder / "val/cat")
    words = (photo_folder, target, "--shard-samples", 30, "--overwrite", "--json")
    _, out, result = call(data_pack, capsys, *words)
    assert "4 shards of an earlier pack removed" in out
    assert result["shards_removed"] == 4
    shards = {"train-000000", "train-000001", "val-000000"}
    names = {f"{name}{suffix}" for name in shards for suffix in (".tar", ".json")}
    assert {path.name for path in target.iterdir()} == {*names, *mine, "index.json", "classes.txt"}
    assert call(data_pack, capsys, *words)[2]["shards_removed"] == 0
    for name in mine:
        (target / name).unlink()
    assert len(open_source(target, kind="webdataset")) == 48


@pytest.mark.parametrize("kind", ["folder", "idx", "cifar"])
@pytest.mark.parametrize("more", [(), ("--overwrite",)], ids=["", "overwrite"])
def test_packing_into_another_data_set_is_refused(photo_folder, tmp_path, capsys, kind, more):
    (tmp_path / "other").mkdir()
    other = MAKERS[kind](tmp_path / "other")
    there = sorted(other.rglob("*"))
    with pytest.raises(DataError, match=r"other: holds other data \(.*; give another target"):
        call(data_pack, capsys, photo_folder, other, *more)
    assert sorted(other.rglob("*")) == there


def test_packing_into_class_folders_is_refused(photo_folder, capsys):
    with pytest.raises(DataError, match=r"val: holds other data \(\w+/\d+\.jpg\)"):
        call(data_pack, capsys, photo_folder / "train", photo_folder / "val")


def test_a_pack_may_lie_beside_files_that_are_not_data(photo_folder, tmp_path, capsys):
    (tmp_path / "packed/notes").mkdir(parents=True)
    (tmp_path / "packed/notes/readme.txt").write_text("x")
    assert call(data_pack, capsys, photo_folder, tmp_path / "packed")[0] == 0
    assert call(data_pack, capsys, photo_folder, tmp_path / "packed")[0] == 0


def test_packing_again_mends_a_shard_that_is_damaged_in_its_place(photo_folder, tmp_path, capsys):
    target = tmp_path / "packed"
    call(data_pack, capsys, photo_folder, target)
    shard = target / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    result = call(data_pack, capsys, photo_folder, target, "--json")[2]
    assert (result["shards_written"], verify_pack(target)) == (1, [])


def test_a_damaged_pack_is_refused_by_name(photo_folder, tmp_path, capsys):
    target = tmp_path / "packed"
    call(data_pack, capsys, photo_folder, target)
    shard = target / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    data[3000] ^= 255
    shard.write_bytes(data)
    assert verify_pack(target) == ["train-000000.tar"]
    # In the padding at the end no image shows the damage; the check does.
    whole = bytearray(data)
    whole[3000] ^= 255
    shard.write_bytes(whole)
    assert call(data_check, capsys, target, "--json")[0] == 0
    whole[-1] ^= 1
    shard.write_bytes(whole)
    code, out, result = call(data_check, capsys, target, "--json")
    assert (code, result["bad"], result["damaged_shards"]) == (1, [], ["train-000000.tar"])
    assert "BAD 'train-000000.tar': its sha256 differs from the index; pack again" in out
    assert "0 bad of 61 files, 1 damaged shard; manifest: " in out
    shard.write_bytes(data[:-512])
    with pytest.raises(DataError, match=r"train-000000\.tar: missing or not"):
        open_source(target)
    index = json.loads((target / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["name"] = "../../etc/passwd.tar"
    (target / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="not a plain name"):
        open_source(target)


def test_sizes_are_only_ever_reduced():
    assert target_size(375, 500, PackOptions()) == (375, 500)
    assert target_size(1000, 500, PackOptions()) == (500, 250)
    assert target_size(1000, 500, PackOptions(max_side=None, short_side=256)) == (512, 256)
    assert target_size(100, 90, PackOptions(max_side=None, short_side=256)) == (100, 90)
    wrong = [{"max_side": 500, "short_side": 256}, {"max_side": None}, {"shard_samples": 0}, {"quality": 101}]
    for options in wrong:
        with pytest.raises(ConfigError, match=f"^--{next(iter(options)).replace('_', '-')}"):
            PackOptions(**options)


def test_info_says_what_is_there(photo_folder, capsys):
    code, out, result = call(DataInfo, capsys, photo_folder, "--json")
    assert code == 0
    assert result["kind"] == "folder"
    assert {name: facts["images"] for name, facts in result["splits"].items()} == {"train": 48, "val": 13}
    assert "decoder in use: " in out
    assert result["decoder"]


def test_a_device_is_not_said_to_be_missing(capsys):
    with pytest.raises(DataError, match="/dev/null: is a device or a pipe; give a folder"):
        call(DataInfo, capsys, "/dev/null")


def test_a_pack_lies_outside_of_its_source(photo_folder, capsys):
    for target in (photo_folder, photo_folder / "packed"):
        with pytest.raises(DataError, match="lies in the data that is packed"):
            call(data_pack, capsys, photo_folder, target)


def test_checking_reads_a_tar_in_place(photo_folder, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(photo_folder, arcname="")
    report = check_sources(
        [open_source(tmp_path / "photos.tar", split) for split in ("train", "val")], workers=2
    )
    assert len(report.files) == 61
    assert report.bad == []
