"""To the Hub and back, against a stand-in for its client: one commit in, the same commit out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.evaluate.load import load_run
from fathoms.models import hub

huggingface_hub = pytest.importorskip("huggingface_hub")


class Store:
    """Repositories in a folder: what was uploaded, by repository and commit."""

    def __init__(self, folder):
        self.folder, self.heads, self.private, self.asked = folder, {}, {}, []

    def create_repo(self, repo, *, private, exist_ok):
        assert exist_ok
        self.private.setdefault(repo, private)

    def create_commit(self, repo, operations, *, commit_message):
        assert commit_message.startswith("fathoms export: model.")
        commit = hashlib.sha1(str((repo, self.heads.get(repo))).encode()).hexdigest()
        for operation in operations:
            target = self.folder / repo / commit / operation.path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(operation.path_or_fileobj).read_bytes())
        self.heads[repo] = commit
        return SimpleNamespace(oid=commit)

    def model_info(self, repo, *, revision):
        assert revision in (None, "main")
        return SimpleNamespace(sha=self.heads[repo])

    def download(self, repo, file, *, revision, endpoint):
        assert endpoint is None
        self.asked.append((file, revision))
        path = self.folder / repo / revision / file
        if not path.is_file():
            raise huggingface_hub.errors.EntryNotFoundError(file)
        return str(path)


@pytest.fixture
def store(tmp_path, monkeypatch):
    store = Store(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: store)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", store.download)
    return store


def pushed(run, tmp_path, capsys, *more):
    words = ["--format", "safetensors", "--output", str(tmp_path / "w.safetensors"), "--push", "me/digits"]
    assert main(["export", str(run), *words, "--overwrite", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["pushed"]


def test_what_is_pushed_is_loaded_at_its_commit_with_its_card(store, digits_run, tmp_path, capsys):
    name = pushed(digits_run, tmp_path, capsys)
    assert name == f"me/digits@{store.heads['me/digits']}"
    folder = store.folder / "me" / "digits" / store.heads["me/digits"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "model.safetensors",
        "model.safetensors.json",
    ]
    readme = (folder / "README.md").read_text()
    assert readme.startswith("---\nlibrary_name: fathoms\n")
    for section in ("## metrics", "## config", "## recipe", "## classes"):
        assert section in readme
    own = load_run(str(digits_run))
    for checkpoint in (name, "me/digits", "me/digits@main"):
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
    assert load_run("me/digits").source == second


def test_a_repository_is_private_unless_it_is_to_be_public(store, digits_run, tmp_path, capsys):
    pushed(digits_run, tmp_path, capsys)
    assert store.private == {"me/digits": True}
    store.private.clear()
    pushed(digits_run, tmp_path, capsys, "--visibility", "public")
    assert store.private == {"me/digits": False}


def test_a_repository_without_a_card_needs_the_model_s_name(store, digits_run, tmp_path, capsys):
    name = pushed(digits_run, tmp_path, capsys)
    (store.folder / "me" / "digits" / store.heads["me/digits"] / hub.CARD).unlink()
    with pytest.raises(FathomsError, match="does not say which model it is; give --model"):
        load_run(name)
    fields = load_run(str(digits_run)).config.to_dict()
    assert load_run(name, "vit_digits", **fields).source == name


def test_mistakes_are_said(store, monkeypatch):
    with pytest.raises(FathomsError, match="a push creates a new commit; leave @main out"):
        hub.push("me/digits@main", {})
    with pytest.raises(FathomsError, match="not a Hub id; write OWNER/NAME"):
        hub.push("digits", {})
    monkeypatch.setattr(store, "model_info", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    with pytest.raises(FathomsError, match="no route.*and there is no such folder or file here"):
        load_run("runs/misspelt")
    monkeypatch.setattr(
        store, "create_repo", lambda *_, **__: (_ for _ in ()).throw(OSError("401 Unauthorized"))
    )
    with pytest.raises(FathomsError, match="the upload failed \\(401 Unauthorized\\); see `hf auth`"):
        hub.push("me/digits", {})
