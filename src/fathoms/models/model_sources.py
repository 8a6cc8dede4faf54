"""The model that a text names: an existing path, a model of the zoo, timm/NAME, or hf-hub:OWNER/NAME, in this order.

Nothing else is looked up anywhere: a misspelt path is answered here, without a request to the network. Files of the Hub
are fetched at one commit and pushed in one; a Hub out of reach is one line. Importing this file imports neither torch
nor timm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fathoms.errors import WeightsError, reason
from fathoms.files import missing
from fathoms.machine import hub_or_cache
from fathoms.models.build_timm import TIMM
from fathoms.models.zoo import ALIASES, MODELS
from fathoms.registry import nearest

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


_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", re.ASCII)
_FORMS = "a run folder, a checkpoint folder, a .safetensors file or hf-hub:OWNER/NAME"


@dataclass(frozen=True)
class NamedModel:
    """The model or weights that a text names.

    Args:
        kind: "path", an existing file or folder; "zoo", an architecture of `list_models()`; "timm", an architecture
            of timm; "hub", a repository of the Hub. Architectures have random weights.
        text: The text as it was given; of a repository with the prefix hf-hub:.
    """

    kind: Literal["path", "zoo", "timm", "hub"]
    text: str

    @property
    def path(self) -> Path:
        assert self.kind == "path"
        return Path(self.text)


def resolve(text: str, where: str = "", forms: str = _FORMS) -> NamedModel:
    """The model that a text names; `where` is the flag or argument that errors begin with, `forms` what it takes.

    >>> resolve("cait_s24_224").kind, resolve("timm/vit_tiny_patch16_224").kind, resolve("hf-hub:me/mine").kind
    ('zoo', 'timm', 'hub')
    """
    if os.path.exists(text):  # noqa: PTH110 - unlike Path.exists, false for a name too long to exist
        return NamedModel("path", text)
    if text in MODELS or text in ALIASES:
        return NamedModel("zoo", text)
    if text.startswith(TIMM) and text != TIMM and not _is_file_name(text):
        return NamedModel("timm", text)
    if text.startswith(PREFIX):
        check_id(text, where)
        return NamedModel("hub", text)
    raise WeightsError(_place(where) + _unknown(text, forms))


def resolve_trained(text: str, where: str = "") -> NamedModel:
    """The trained model that a text names, a path or a repository; an architecture alone is refused."""
    found = resolve(text, where)
    if found.kind == "zoo":
        raise WeightsError(
            f"{_place(where)}{text}: names an architecture without weights; give {_FORMS}, and the name as --model"
        )
    if found.kind == "timm":
        name = text.removeprefix(TIMM)
        raise WeightsError(
            f"{_place(where)}{text}: names an architecture without weights; "
            f"for weights on the Hub write {PREFIX}timm/{name}"
        )
    return found


def resolve_weights(text: str, where: str = "") -> NamedModel:
    """The weights that a text names, to load into a model: a path, or a repository; timm/NAME is timm's own there."""
    if text.startswith(TIMM) and is_id(text) and not os.path.exists(text):  # noqa: PTH110
        text = PREFIX + text
    return resolve_trained(text, where)


def refuse_weights(text: str, where: str) -> None:
    """Refuse what names weights, where an architecture is asked for; other unknown names are left to their family."""
    is_path = text not in MODELS and text not in ALIASES and os.path.exists(text)  # noqa: PTH110
    if is_path or text.startswith(PREFIX) or _is_file_name(text):
        raise WeightsError(
            f"{_place(where)}{text}: names weights, not an architecture; give a name from `fathoms models`, and the "
            f"weights as --initial-checkpoint {text}"
        )


def _place(where: str) -> str:
    return f"{where} " if where else ""


def _is_file_name(text: str) -> bool:
    return text.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".onnx", ".pt2"))


def _unknown(text: str, forms: str) -> str:
    """Words on a text that names nothing: the nearest path, model or repository."""
    page = _PAGE.match(text)
    if page:
        return f"{text}: pages are not read; write {PREFIX}{page[1]}"
    otherwise = f"give {forms}"
    if "/" not in text and not _is_file_name(text):
        # Who takes other forms takes no architecture.
        near = nearest(text, [*MODELS, *ALIASES]) if forms == _FORMS else None
        otherwise = f"did you mean the model {near!r}?" if near else otherwise
    elif is_id(text) and not _is_file_name(text):
        otherwise = f"for a repository of the Hub write {PREFIX}{text}"
    return missing(text, otherwise)
