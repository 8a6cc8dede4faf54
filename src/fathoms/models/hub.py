"""Hugging Face Hub: download a file at one commit, upload files in one commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fathoms.errors import WeightsError, reason

FILE = "model.safetensors"
CARD = f"{FILE}.json"

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class NoSuchFileError(WeightsError):
    """The repository can be reached and does not hold the file."""


def is_hub_id(source: object) -> bool:
    """Whether a text names a Hub repository, "OWNER/NAME" or "OWNER/NAME@REVISION", and not a file."""
    return (
        isinstance(source, str)
        and _ID.fullmatch(source) is not None
        and not source.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt"))
        and not Path(source).exists()
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
    match = _ID.fullmatch(hub_id)
    if match is None:
        raise WeightsError(f"{hub_id}: not a Hub id; write OWNER/NAME or OWNER/NAME@REVISION")
    return match["repo"], match["revision"]


def fetch(hub_id: str, file: str = FILE, *, endpoint: str | None = None) -> tuple[Path, str]:
    """Download one file of a repository at one commit.

    A branch, a tag or no revision is resolved to its commit first, so that the same file can be named and read
    again.

    Args:
        hub_id: "OWNER/NAME" or "OWNER/NAME@REVISION".
        file: Its name in the repository.
        endpoint: Server to use instead of the public one.

    Returns:
        The local file, and "OWNER/NAME@COMMIT".
    """
    client = _client(hub_id)
    errors = client.errors
    repo, revision = _split(hub_id)
    try:
        if revision is None or not _COMMIT.fullmatch(revision):
            revision = client.HfApi(endpoint=endpoint).model_info(repo, revision=revision).sha
        # The server's reply ends up in paths and messages, so nothing but a commit hash is accepted.
        if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
            raise WeightsError(f"{hub_id}: the Hub names no commit for it; give OWNER/NAME@COMMIT")
        path = client.hf_hub_download(repo, file, revision=revision, endpoint=endpoint)
    except errors.LocalEntryNotFoundError as error:
        raise WeightsError(f"{hub_id}: not in the local cache, and the Hub cannot be reached") from error
    except errors.EntryNotFoundError as error:
        raise NoSuchFileError(
            f"{hub_id}: the repository holds no {file}, and nothing else is opened"
        ) from error
    # A dropped connection or a malformed id raises errors of the HTTP client underneath.
    except (errors.HfHubHTTPError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise WeightsError(f"{hub_id}: the download failed ({reason(error)})") from error
    return Path(path), f"{repo}@{revision}"


def push(repo: str, files: Mapping[str, Path], *, public: bool = False, endpoint: str | None = None) -> str:
    """Upload files to a repository in one commit, creating the repository if needed.

    Args:
        repo: "OWNER/NAME"; without a revision, since the commit is new.
        files: Name in the repository, and the local file.
        public: Whether a new repository is public.
        endpoint: Server to use instead of the public one.

    Returns:
        "OWNER/NAME@COMMIT", which `fetch` reads.
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
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        commit = api.create_commit(name, added, commit_message=f"fathoms export: {', '.join(files)}")
    except (client.errors.HfHubHTTPError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise WeightsError(f"{repo}: the upload failed ({reason(error)}); see `hf auth`") from error
    return f"{name}@{commit.oid}"
