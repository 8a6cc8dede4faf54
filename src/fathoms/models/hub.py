"""Hugging Face Hub: download a file at one commit, upload files in one commit; a Hub out of reach is one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fathoms.errors import WeightsError, reason
from fathoms.machine.hub_reach import hub_or_cache

FILE = "model.safetensors"
CARD = f"{FILE}.json"

PREFIX = "hf-hub:"
"""Prefix of the names of Hub repositories."""

_ID = re.compile(r"(?:hf-hub:)?(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class NoSuchFileError(WeightsError):
    """The repository can be reached and does not hold the file."""


def is_id(text: str) -> bool:
    """Whether a text has the form of a repository, OWNER/NAME or OWNER/NAME@REVISION, with or without hf-hub:."""
    return _ID.fullmatch(text) is not None


def check_id(text: str, where: str = "") -> None:
    """Refuse a text that is not the form of a repository."""
    if not is_id(text):
        place = f"{where} " if where else ""
        raise WeightsError(
            f"{place}{text}: not a Hub id; write {PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME@REVISION"
        )


def _client(hub_id: str) -> Any:
    """The huggingface_hub package, an optional dependency."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise WeightsError(
            f"{hub_id}: the Hub needs an optional dependency; pip install 'fathoms[hub]'"
        ) from error
    return huggingface_hub


def _split(hub_id: str) -> tuple[str, str | None]:
    check_id(hub_id)
    match = _ID.fullmatch(hub_id)
    assert match is not None
    return match["repo"], match["revision"]


def fetch(hub_id: str, file: str = FILE, *, endpoint: str | None = None) -> tuple[Path, str]:
    """Download one file of a repository at one commit.

    A branch, a tag or no revision is resolved to its commit first, so that the same file can be named and read
    again.

    Args:
        hub_id: "hf-hub:OWNER/NAME" or "hf-hub:OWNER/NAME@REVISION"; the prefix may be left out here.
        file: Its name in the repository.
        endpoint: Server to use instead of the public one.

    Returns:
        The local file, and "hf-hub:OWNER/NAME@COMMIT", which names the same file for ever.
    """
    client = _client(hub_id)
    repo, revision = _split(hub_id)
    with hub_or_cache(endpoint) as online:
        try:
            if revision is None or not _COMMIT.fullmatch(revision):
                revision = client.HfApi(endpoint=endpoint).model_info(repo, revision=revision).sha
            # The server's reply ends up in paths and messages, so nothing but a commit hash is accepted.
            if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
                raise WeightsError(
                    f"{hub_id}: the Hub names no commit for it; give {PREFIX}OWNER/NAME@COMMIT"
                )
            path = client.hf_hub_download(repo, file, revision=revision, endpoint=endpoint)
        except WeightsError:
            raise
        # A dropped connection raises errors of the HTTP client underneath, of which there have been three.
        except Exception as error:
            raise _fault(error, hub_id, file, client.errors, online) from error
    return Path(path), f"{PREFIX}{repo}@{revision}"


def _fault(error: Exception, hub_id: str, file: str, errors: Any, online: bool) -> WeightsError:
    """The error for a download that failed."""
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return NoSuchFileError(f"{hub_id}: the repository holds no {file}, and nothing else is opened")
    if not online or isinstance(error, errors.LocalEntryNotFoundError):
        return WeightsError(
            f"{hub_id}: the Hub cannot be reached, and the local cache does not hold it; give a local file, or "
            f"the commit of a cached one as @COMMIT"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
        return WeightsError(f"{hub_id}: no such repository or revision; a private one needs `hf auth login`")
    return WeightsError(f"{hub_id}: the download failed ({reason(error)}); try again")


def push(repo: str, files: Mapping[str, Path], *, public: bool = False, endpoint: str | None = None) -> str:
    """Upload files to a repository in one commit, creating the repository if needed.

    Args:
        repo: "OWNER/NAME"; without a revision, since the commit is new.
        files: Name in the repository, and the local file.
        public: Whether a new repository is public.
        endpoint: Server to use instead of the public one.

    Returns:
        "hf-hub:OWNER/NAME@COMMIT", which `fetch` reads.
    """
    client = _client(repo)
    name, revision = _split(repo)
    if revision is not None:
        raise WeightsError(f"{repo}: a push creates a new commit; leave @{revision} out")
    added = [
        client.CommitOperationAdd(path_in_repo=target, path_or_fileobj=str(path))
        for target, path in files.items()
    ]
    api = client.HfApi(endpoint=endpoint)
    with hub_or_cache(endpoint) as online:
        try:
            api.create_repo(name, private=not public, exist_ok=True)
            commit = api.create_commit(name, added, commit_message=f"fathoms export: {', '.join(files)}")
        except Exception as error:
            if not online:
                raise WeightsError(f"--push {repo}: the Hub cannot be reached; try again") from error
            raise WeightsError(
                f"--push {repo}: the upload failed ({reason(error)}); see `hf auth login`"
            ) from error
    return f"{PREFIX}{name}@{commit.oid}"
