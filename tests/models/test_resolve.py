"""Names of models: a path, the zoo, timm, the Hub; anything else is answered here, without the network."""

from __future__ import annotations

import time

import pytest

import fathoms
from fathoms import FathomsError
from fathoms import machine as hub_reach
from fathoms.models import model_sources
from fathoms.models.model_sources import resolve, resolve_trained, resolve_weights


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a request to the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits-1a2b").mkdir(parents=True)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    return tmp_path


def test_an_existing_path_comes_before_every_other_meaning(here):
    (here / "timm").mkdir()
    (here / "timm" / "vit_tiny_patch16_224").mkdir()
    (here / "vit_digits").mkdir()
    for text in ("runs/digits-1a2b", "weights.safetensors", "timm/vit_tiny_patch16_224", "vit_digits"):
        assert resolve(text).kind == "path"
        assert resolve_weights(text).path.exists()


def test_names_that_are_no_path():
    assert resolve("vit_digits").kind == "zoo"
    assert resolve("vit5_small").kind == "zoo"
    assert resolve("timm/anything").kind == "timm"
    assert resolve("hf-hub:me/mine@main").kind == "hub"
    assert resolve_weights("timm/vit_tiny_patch16_224.augreg_in21k").text.startswith("hf-hub:timm/vit_tiny")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs/digits-1a2c", "runs/digits-1a2c: no such file or folder; did you mean 'runs/digits-1a2b'?"),
        ("run/digits", "run/digits: no such file or folder; did you mean 'runs/digits-1a2b'?"),
        (
            "weigths.safetensors",
            "weigths.safetensors: no such file or folder; did you mean 'weights.safetensors'?",
        ),
        (
            "owner/name",
            "owner/name: no such file or folder; for a repository of the Hub write hf-hub:owner/name",
        ),
        ("vit_digit", "vit_digit: no such file or folder; did you mean the model 'vit_digits'?"),
        ("https://huggingface.co/me/mine", "pages are not read; write hf-hub:me/mine"),
        ("hf-hub:mine", "hf-hub:mine: not a Hub id; write hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION"),
        ("a/b/c/d", "a/b/c/d: no such file or folder; give a run folder, a checkpoint folder"),
        ("", ": no such file or folder; give a run folder"),
        ("x" * 5000, "no such file or folder"),
        ("a\0b", "no such file or folder"),
        ("timm/", "timm/: no such file or folder"),
    ],
)
def test_anything_else_is_a_path_that_is_not_there(text, message):
    with pytest.raises(FathomsError) as caught:
        resolve(text, "--checkpoint")
    assert str(caught.value).startswith(f"--checkpoint {text[:20]}".replace("\0", "\\x00"))
    assert message in str(caught.value)


def test_an_architecture_is_not_a_trained_model():
    with pytest.raises(FathomsError, match="--checkpoint vit_digits: names an architecture without weights"):
        resolve_trained("vit_digits", "--checkpoint")
    with pytest.raises(FathomsError, match="for weights on the Hub write hf-hub:timm/resnet50"):
        resolve_trained("timm/resnet50", "--checkpoint")


def test_load_weights_answers_a_typo_locally():
    with pytest.raises(FathomsError, match="no such file or folder; for a repository of the Hub write"):
        fathoms.create_model("vit_digits", weights="runs/typo")


def test_a_hub_that_does_not_answer_is_one_line_in_time(monkeypatch):
    # Imported first, so that the client itself keeps its own session.
    pytest.importorskip("huggingface_hub.hf_api")
    monkeypatch.setattr(hub_reach, "SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: time.sleep(5))
    began = time.monotonic()
    with pytest.raises(FathomsError, match="hf-hub:me/mine: the Hub cannot be reached"):
        model_sources.fetch("hf-hub:me/mine")
    with pytest.raises(FathomsError, match="--push me/mine: the Hub cannot be reached; try again"):
        model_sources.push("me/mine", {})
    assert time.monotonic() - began < 4


def test_a_failing_connection_is_one_line_too():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(FathomsError, match="hf-hub:me/mine: the Hub cannot be reached"):
        model_sources.fetch("hf-hub:me/mine")


def test_out_of_reach_the_clients_are_offline_inside_the_block_only(monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(hub_reach, "reachable", lambda *_: False)
    with hub_reach.hub_or_cache() as online:
        assert not online
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()
