"""A stand-in for the Hub's client: repositories and commits in a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub


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


def stand_in(folder, monkeypatch):
    """Let `huggingface_hub` talk to a folder."""
    store = Store(folder)
    monkeypatch.setattr("fathoms.machine.reachable", lambda *_: True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: store)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", store.download)
    return store
