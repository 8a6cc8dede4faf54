"""To the Hub and back, against a stand-in for its client: one commit in, the same commit out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.evaluating.load import load_run
from fathoms.models import model_sources

pytest.importorskip("huggingface_hub")
yaml = pytest.importorskip("yaml")


@pytest.fixture
def store(tmp_path, monkeypatch):
    from hub_store import stand_in

    return stand_in(tmp_path / "hub", monkeypatch)


def pushed(run, tmp_path, capsys, *more):
    words = ["--format", "safetensors", "--output", str(tmp_path / "w.safetensors"), "--push", "me/digits"]
    assert main(["export", str(run), *words, "--overwrite", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["pushed"]


def test_what_is_pushed_is_loaded_at_its_commit_with_its_card(store, digits_run, tmp_path, capsys):
    name = pushed(digits_run, tmp_path, capsys)
    assert name == f"hf-hub:me/digits@{store.heads['me/digits']}"
    folder = store.folder / "me" / "digits" / store.heads["me/digits"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "model.safetensors",
        "model.safetensors.json",
    ]
    readme = (folder / "README.md").read_text()
    head = yaml.safe_load(readme.split("---\n")[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("fathoms", "image-classification")
    (result,) = head["model-index"][0]["results"]
    assert result["dataset"] == {"name": "digits", "type": "digits", "split": "test"}
    assert result["metrics"][0]["value"] == load_run(str(digits_run)).metrics["test"]["top1"]
    for section in ("## metrics", "## config", "## recipe", "## classes"):
        assert section in readme
    own = load_run(str(digits_run))
    for checkpoint in (name, "hf-hub:me/digits", "hf-hub:me/digits@main"):
        loaded = load_run(checkpoint)
        assert loaded.source == name
        assert (loaded.classes, loaded.preprocessing) == (own.classes, own.preprocessing)
        images = torch.randn(2, 1, 8, 8)
        assert torch.equal(loaded.model(images), own.model(images))
    assert {revision for _, revision in store.asked} == {store.heads["me/digits"]}


@pytest.mark.usefixtures("store")
def test_an_old_commit_stays_what_it_was(digits_run, tmp_path, capsys):
    first = pushed(digits_run, tmp_path, capsys)
    second = pushed(digits_run, tmp_path, capsys)
    assert first != second
    assert load_run(first).source == first
    assert load_run("hf-hub:me/digits").source == second


def test_a_repository_is_private_unless_it_is_to_be_public(store, digits_run, tmp_path, capsys):
    pushed(digits_run, tmp_path, capsys)
    assert store.private == {"me/digits": True}
    store.private.clear()
    pushed(digits_run, tmp_path, capsys, "--visibility", "public")
    assert store.private == {"me/digits": False}


def test_a_repository_without_a_card_needs_the_model_s_name_where_its_weights_do_not_say_it(
    store, digits_run, tmp_path, capsys
):
    name = pushed(digits_run, tmp_path, capsys)
    folder = store.folder / "me" / "digits" / store.heads["me/digits"]
    (folder / model_sources.CARD).unlink()
    assert load_run(name).config == load_run(str(digits_run)).config
    (weights,) = folder.glob("*.safetensors")
    save_file(load_file(weights), weights)
    with pytest.raises(FathomsError, match="does not say which model it is; give --model"):
        load_run(name)
    fields = load_run(str(digits_run)).config.to_dict()
    del fields["drop_path_schedule"]
    assert load_run(name, "vit_digits", **fields).source == name


def test_mistakes_are_said(store, monkeypatch):
    with pytest.raises(FathomsError, match="a push creates a new commit; leave @main out"):
        model_sources.push("me/digits@main", {})
    with pytest.raises(FathomsError, match="not a Hub id; write hf-hub:OWNER/NAME"):
        model_sources.push("digits", {})
    monkeypatch.setattr(store, "model_info", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    with pytest.raises(FathomsError, match="hf-hub:me/digits: the download failed \\(no route\\)"):
        load_run("hf-hub:me/digits")
    monkeypatch.setattr(
        store, "create_repo", lambda *_, **__: (_ for _ in ()).throw(OSError("401 Unauthorized"))
    )
    with pytest.raises(FathomsError, match="the upload failed \\(401 Unauthorized\\); see `hf auth login`"):
        model_sources.push("me/digits", {})
