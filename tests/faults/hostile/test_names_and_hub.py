"""Names are printed as text, JSON stays JSON, and a Hub repository with the wrong files gives none of them."""

from __future__ import annotations

import json
import os

import pytest
from PIL import Image

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.cli.main import main
from fathoms.errors import printable

pytestmark = pytest.mark.plain

ODD = [
    "a\x1b[2Jb",
    "a\nBAD forged",
    "a\x07",
    "a\x9bb",
    "\u202egpj",
    "tab\t",
    b"\xff\xfe".decode("utf-8", "surrogateescape"),
]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_printable_leaves_no_control_character(name):
    line = printable(name)
    assert line.isprintable()
    line.encode("utf-8")
    assert printable("Katze ä 猫 🐈") == "Katze ä 猫 🐈"


def test_an_error_is_one_printable_line_whatever_is_in_it():
    for name in ODD:
        assert str(FathomsError(f"{name}: no such file")).isprintable()
    assert len(str(FathomsError("x" * 10**6))) < 2100


@pytest.fixture
def odd_folder(place):
    folder = place / "d" / "train" / "cat"
    folder.mkdir(parents=True)
    for number, name in enumerate(ODD):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(place / "p.png")
        (place / "p.png").rename(folder / f"{name}.png")
    (folder / "broken\x1b]0;owned\x07\n.png").write_bytes(b"not an image\x1b[31m")
    return place / "d"


def test_file_names_are_told_as_text_and_json_stays_json(odd_folder, capfd):
    assert main(["data", "check", str(odd_folder), "--json", "--workers", "1"]) == 1
    out, err = capfd.readouterr()
    lines = out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert "\x1b" not in err
    report = json.loads(lines[-2])
    assert report["files"] == len(ODD) + 1
    assert report["bad"][0]["name"] == "train/cat/broken\x1b]0;owned\x07\n.png"
    assert sum(line.startswith("BAD ") for line in lines) == 1
    manifest = json.loads((odd_folder / "fathoms-manifest.json").read_text())
    assert len(manifest["splits"]["train"]["files"]) == len(ODD) + 1


def test_predictions_on_such_files_are_told_as_text(odd_folder, place, capfd):
    config = ViTConfig(image_size=8, patch_size=2, dim=8, heads=2, depth=1, num_classes=3)
    fathoms.save_weights(ViT(config), place / "w.safetensors")
    (place / "w.safetensors.json").write_text(json.dumps({"config": config.to_dict()}))
    words = ["predict", str(odd_folder), "--checkpoint", "w.safetensors", "--top", "2"]
    assert main(words) == 1
    out = capfd.readouterr().out
    assert len(out.splitlines()) == len(ODD) + 2
    assert all(line.isprintable() for line in out.split("\n"))
    assert main([*words, "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["bad"] == 1


@pytest.mark.parametrize("name", [name for name in ODD if not name.startswith("\u202e")], ids=ascii)
def test_a_class_with_such_a_name_is_refused(name, place, refused):
    (place / "d" / "train" / name).mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(place / "p.png")
    (place / "p.png").rename(place / "d" / "train" / name / "0.png")
    refused("data", "info", place / "d", says="control characters")


def test_an_argument_with_such_a_name_is_told_as_text(refused):
    for name in ODD:
        refused("data", "info", name)
        refused("validate", "--checkpoint", f"{name}.safetensors", "--model", "vit_digits")
        refused("train", f"--{name}")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Stub:
    """The two functions of huggingface_hub that are called, giving what a hostile server would."""

    def __init__(self, monkeypatch, sha=COMMIT, path=None, error=None):
        import huggingface_hub

        self.asked: list[tuple] = []
        stub = self

        class Api:
            def __init__(self, endpoint=None):
                pass

            def model_info(self, repo, revision=None):  # noqa: ARG002
                return type("Info", (), {"sha": sha})()

        def download(repo, name, revision=None, endpoint=None):  # noqa: ARG001
            stub.asked.append((repo, name, revision))
            if error is not None:
                raise error
            return str(path)

        monkeypatch.setattr("fathoms.machine.reachable", lambda *_: True)
        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


@pytest.fixture(autouse=True)
def needs_hub():
    pytest.importorskip("huggingface_hub")


def loaded(source="hf-hub:owner/name"):
    with pytest.raises(FathomsError) as caught:
        fathoms.load_weights(ViT(ViTConfig(image_size=8, patch_size=2, dim=8, heads=2, depth=1)), source)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_repository_with_a_pickle_under_the_right_name(evil, place, monkeypatch):
    (place / "model.safetensors").write_bytes(evil)
    stub = Stub(monkeypatch, path=place / "model.safetensors")
    assert "not a readable safetensors file" in loaded()
    assert stub.asked == [("owner/name", "model.safetensors", COMMIT)]


@pytest.mark.parametrize("sha", [None, "", "main", "../../etc", "a" * 39, 5, COMMIT + "\n"], ids=repr)
def test_a_server_that_names_no_commit_is_asked_for_nothing(sha, monkeypatch):
    stub = Stub(monkeypatch, sha=sha)
    assert "names no commit" in loaded()
    assert stub.asked == []


def test_files_that_are_none(place, monkeypatch):
    (place / "folder.safetensors").mkdir()
    os.mkfifo(place / "pipe.safetensors")
    for name in ("folder.safetensors", "pipe.safetensors", "nothing.safetensors"):
        Stub(monkeypatch, path=place / name)
        assert "no such file" in loaded()
    (place / "model.bin").write_bytes(b"x")
    Stub(monkeypatch, path=place / "model.bin")
    assert "only .safetensors files are opened" in loaded()


@pytest.mark.parametrize(
    "error",
    [ValueError("a\x1b[2J\nb"), OSError("gone"), RuntimeError("client closed"), TypeError("bytes")],
    ids=repr,
)
def test_whatever_the_client_raises_is_one_line(error, monkeypatch):
    Stub(monkeypatch, error=error)
    assert "the download failed" in loaded()


@pytest.mark.parametrize("source", ["../x", "a..b/c", "-/-", "x/.git", "a/b@../../c", "owner/name"])
def test_ids_that_would_be_paths_fetch_nothing(source, monkeypatch):
    stub = Stub(monkeypatch)
    loaded(source)
    assert stub.asked == []
    loaded(f"hf-hub:{source}")
    assert all(name == "model.safetensors" and revision == COMMIT for _, name, revision in stub.asked)
