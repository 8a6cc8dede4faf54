"""Untrusted recipes, cards, indices and names: refused in one line, whatever they hold."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from PIL import Image

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.data import DataError, open_source
from fathoms.data.readiness import verify_manifest
from fathoms.evaluating.results import read_real

pytestmark = pytest.mark.plain

RECIPES = {
    "nested lists": ("epochs = " + "[" * 50_000 + "]" * 50_000, "nested too deeply"),
    "nested tables": ("model" + ".a" * 50_000 + " = 1", "a key of more than 100 parts"),
    "a number of 5,000 digits": ("epochs = " + "9" * 5_000, "not readable as TOML"),
    "a large number": (f"epochs = {10**30}", "more than 64 bits"),
    "too many epochs": ("epochs = 2000000", "--epochs 2000000: use 1000000 or less"),
    "too few": ("epochs = -1", "--epochs -1: use 1 or more"),
    "infinity": ("weight_decay = inf", "weight-decay=inf is not finite"),
    "not a number": ("lr = nan", "lr=nan is not finite"),
    "a text for a number": ('lr = "0.1"', "lr='0.1' is not a number"),
    "yes for a number": ("epochs = true", "epochs=True is not a whole number"),
    "a number for yes": ("amp = 1", "amp=1 is neither true nor false"),
    "a fraction for a count": ("epochs = 1.5", "epochs=1.5 is not a whole number"),
    "a date": ("lr = 2024-01-01", "is not a number"),
    "a list of the wrong length": ("mean = [0.5, 0.5]", "is not a list of 3 values"),
    "a table for a name": ("opt = {a = 1}", "is not a name"),
    "an unknown choice": ('opt = "adm"', "no value is called 'adm'; did you mean 'adamw'"),
    "a module for a choice": ('sched = "os.system"', "no value is called 'os.system'"),
    "an unknown key": ('_target_ = "os.system"', "no option is called '_target_'"),
    "an unknown key of the model": ('[model]\nclass_path = "os.system"', "no option is called 'class_path'"),
    "no table": ("model = 3", "model must be a table"),
    "a list of tables": ("[[model]]\ndim = 3", "model must be a table"),
    "a path for a model": ('[model]\nname = "../../etc/passwd"', "no model is called '../../etc/passwd'"),
    "a number for a model": ("[model]\nname = 5", "[model] name must be a string"),
    "a giant": ('[model]\nname = "vit_digits"\ndim = 999999999', "dim=999999999 is too large"),
    "a tower": ('[model]\nname = "vit_digits"\ndepth = 100000000', "depth=100000000 is too large"),
    "a text of a megabyte": (f'aa = "{"x" * 900_000}"', "is not a string of up to"),
    "two megabytes": ("# " + "x" * (2 << 20), "not readable as TOML"),
    "a name with a bell": ('"\\u0007\\u001b[2J" = 1', "no option is called"),
    "a key of a megabyte": (f"{'x' * 900_000} = 1", "no option is called"),
    "half a surrogate": ('aa = "\\ud800"', "not readable as TOML"),
    "unfinished": ('aa = "', "not readable as TOML"),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_an_untrusted_recipe(kind, place, refused):
    text, says = RECIPES[kind]
    (place / "r.toml").write_text(text)
    printed = refused("train", "--recipe", "r.toml", "--device", "cpu", says=says)
    assert len(printed) < 2500


def test_a_recipe_that_is_no_text_or_no_file(place, refused):
    (place / "r.toml").write_bytes(b"\xff\xfe\x00aa = 1")
    refused("train", "--recipe", "r.toml", says="not readable as TOML")
    (place / "r.toml").unlink()
    os.mkfifo(place / "r.toml")
    refused("train", "--recipe", "r.toml", says="no such file")
    (place / "r.toml").unlink()
    (place / "r.toml").symlink_to("/dev/zero")
    refused("recipes", "r.toml", says="no such file")


@pytest.mark.parametrize(
    "name", ["..", ".", "...", "a/b", "../x", "/tmp/x", "a\x1b[2J", "a\nb", "x" * 300, ""]
)
def test_a_run_cannot_be_named_out_of_its_folder(name, refused):
    refused("train", "--experiment", name, "--device", "cpu", says="--experiment")


CARDS = {
    "nested": ("[" * 100_000, "nested too deeply"),
    "NaN": ('{"config": {"mlp_ratio": NaN}}', "NaN is not JSON"),
    "infinity": ('{"config": {"mlp_ratio": 1e999}}', "mlp_ratio=inf is not finite"),
    "a list": ("[1]", "a JSON object is expected"),
    "no config": ('{"a": 1}', "it has no config"),
    "an unknown key": ('{"config": {"__class__": "os.system"}}', "no option is called '__class__'"),
    "a text": ('{"config": {"dim": "64"}}', "dim='64' is not a whole number"),
    "a list for a name": ('{"config": {"norm": ["layernorm"]}}', "is not a name"),
    "a range of blocks": ('{"config": {"norm_by_depth": "0-99999999999999999999:dyt"}}', "leaves the blocks"),
    "many digits": ('{"config": {"dim": ' + "9" * 5000 + "}}", "not readable as JSON"),
}


@pytest.mark.parametrize("kind", CARDS)
def test_an_untrusted_card(kind, place, refused):
    text, says = CARDS[kind]
    fathoms.save_weights(ViT(ViTConfig(image_size=8, patch_size=2, dim=8, heads=2, depth=1)), "w.safetensors")
    (place / "w.safetensors.json").write_text(text)
    Image.new("L", (8, 8)).save(place / "a.png")
    refused("predict", "a.png", "--checkpoint", "w.safetensors", says=says)


def pack(place):
    """A pack of one image, as `fathoms data pack` writes it."""
    (place / "pack").mkdir()
    (place / "pack" / "train-000000.tar").write_bytes(bytes(1024))
    index = {
        "format": "fathoms-pack-1",
        "classes": ["a", "b"],
        "splits": {"train": {"shards": [{"name": "train-000000.tar", "bytes": 1024, "sha256": "0"}]}},
    }
    return index, {"samples": [["0.jpg", 0, 0, 10]]}


def write_pack(place, index, side):
    (place / "pack" / "index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    (place / "pack" / "train-000000.json").write_text(side if isinstance(side, str) else json.dumps(side))
    return place / "pack"


def changed(path, value):
    """An index in which the entry at a path is another value."""

    def change(index, side):
        index, side = json.loads(json.dumps(index)), json.loads(json.dumps(side))
        *way, last = path
        place = {"index": index, "side": side}
        for step in way:
            place = place[step]
        place[last] = value
        return index, side

    return change


SHARD = ("index", "splits", "train", "shards")
PACKS = {
    "nested": lambda _i, s: ("[" * 100_000, s),
    "nested table of samples": lambda i, _s: (i, '{"samples":' + "[" * 100_000),
    "NaN offset": lambda i, _s: (i, '{"samples": [["0.jpg", 0, NaN, 10]]}'),
    "infinite label": changed(("side", "samples", 0, 1), 1e308 * 10),
    "label of 30 digits": changed(("side", "samples", 0, 1), 10**30),
    "negative label": changed(("side", "samples", 0, 1), -1),
    "label too high": changed(("side", "samples", 0, 1), 2),
    "negative offset": changed(("side", "samples", 0, 2), -5),
    "negative size": changed(("side", "samples", 0, 3), -5),
    "sizes that cancel": changed(("side", "samples", 0), ["0.jpg", 0, 2000, -1500]),
    "a fraction": changed(("side", "samples", 0, 2), 0.5),
    "past the end": changed(("side", "samples", 0, 3), 1025),
    "a text": changed(("side", "samples", 0, 2), "0"),
    "no list": changed(("side", "samples"), 7),
    "a path for a shard": changed((*SHARD, 0, "name"), "../../secret.tar"),
    "an absolute shard": changed((*SHARD, 0, "name"), "/etc/passwd.tar"),
    "a shard with too long a name": changed((*SHARD, 0, "name"), "x" * 300 + ".tar"),
    "a number for a shard": changed((*SHARD, 0, "name"), 5),
    "true for a size": changed((*SHARD, 0, "bytes"), True),
    "no shards": changed(SHARD, {}),
    "splits as a list": changed(("index", "splits"), ["train"]),
    "no classes": changed(("index", "classes"), 3),
    "numbers for classes": changed(("index", "classes"), [1, 2]),
    "a class that clears the screen": changed(("index", "classes"), ["a", "\x1b[2J"]),
    "another format": changed(("index", "format"), ["fathoms-pack-1"]),
}


@pytest.mark.parametrize("kind", PACKS)
def test_an_untrusted_pack(kind, place, refused):
    folder = write_pack(place, *PACKS[kind](*pack(place)))
    refused("data", "info", folder)


def test_a_pack_as_it_should_be_opens(place):
    assert len(open_source(write_pack(place, *pack(place)))) == 1


MANIFESTS = ["[]", "3", "[" * 100_000, '{"format": "fathoms-manifest-1", "splits": {"train": NaN}}']
MANIFESTS += [
    json.dumps({"format": "fathoms-manifest-1", "splits": splits})
    for splits in (
        [],
        3,
        {"train": 5},
        {"train": {"classes": 5}},
        {"train": {"classes": ["a"], "files": 3}},
        {"train": {"classes": ["a"], "files": [[1, 2]]}},
        {"train": {"classes": ["a"], "files": [["a\x1b[2J", 1, 2, 3]]}},
        {"train": {"classes": ["a"], "files": [[{}, [], {}, 3]]}},
        {"train": {"classes": ["a"], "fingerprint": {"a": 1}}},
    )
]


@pytest.mark.parametrize("text", MANIFESTS, ids=lambda text: text[:70])
def test_an_untrusted_manifest(text, place):
    (place / "d" / "train" / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(place / "d" / "train" / "a" / "0.png")
    (place / "m.json").write_text(text)
    with pytest.raises(DataError) as caught:
        verify_manifest(place / "m.json", open_source(place / "d"))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[1]", '[["a"]]', "[[NaN]]", "[[1.5]]", "\x00"])
def test_untrusted_real_labels(text, place):
    (place / "real.json").write_text(text)
    with pytest.raises(FathomsError) as caught:
        read_real(place / "real.json")
    assert str(caught.value).isprintable()


def arrays(place, **changes):
    content = {"x_train": np.zeros((4, 8, 8, 3), np.uint8), "y_train": np.arange(4)} | changes
    np.savez(place / "set.npz", **content)
    return place / "set.npz"


@pytest.mark.parametrize(
    "changes",
    [
        {"y_train": np.array([0, 1, 2, 10**9])},
        {"y_train": np.array([0, 1, 2, 2**62])},
        {"y_train": np.array([0, 1, 2, -1])},
        {"y_train": np.array([0.0, np.nan, 1, 2])},
        {"y_train": np.array(["a", "b", "c", "d"])},
        {"y_train": np.zeros(4, [("a", "i4")])},
        {"y_train": np.zeros((0,), np.int64)},
        {"x_train": np.zeros((), np.uint8)},
        {"classes": np.array(["a", "b", "c", "\x1b[2Jd"])},
        {"classes": np.array(["a", "b", "c", "d\ne"])},
        {"classes": np.array(["a", "b", "c", "\udcff"], dtype="U8")},
    ],
    ids=str,
)
def test_untrusted_arrays(changes, place, refused):
    refused("data", "info", arrays(place, **changes))


def test_lists_of_class_names_are_checked_where_they_enter(place, refused):
    from fathoms.evaluating.predict import class_names

    for text in (b"a\n\xff\n", b"a\nb\x1b[2J\n", b"a\n" + b"x" * 300, b""):
        (place / "names.txt").write_bytes(text)
        with pytest.raises(FathomsError) as caught:
            class_names(place / "names.txt", None, 2)
        assert str(caught.value).isprintable()
    with pytest.raises(FathomsError, match="not readable as a list of names"):
        class_names(place / "nowhere.txt", None, 2)
    refused("data", "info", place / "nowhere", says="no such file or folder")
