"""Weights from the Hugging Face Hub: one safetensors file, at one commit."""

from __future__ import annotations

import re
from pathlib import Path

from fathoms.errors import WeightsError

FILE = "model.safetensors"

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(source: object) -> bool:
    """Whether a text names a Hub repository, "OWNER/NAME" or "OWNER/NAME@REVISION", and no file."""
    return (
        isinstance(source, str)
        and _ID.fullmatch(source) is not None
        and not source.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt"))
        and not Path(source).exists()
    )


def fetch(hub_id: str, endpoint: str | None = None) -> tuple[Path, str]:
    """Download a repository's safetensors file at one commit.

    A branch or tag, or no revision at all, is resolved to the commit it stands for first, so that what
    was read can be named and read again.

    Args:
        hub_id: "OWNER/NAME" or "OWNER/NAME@REVISION".
        endpoint: Another server than the public one.

    Returns:
        The local file, and "OWNER/NAME@COMMIT".
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise WeightsError(f"{hub_id}: the Hub needs an extra; pip install 'fathoms[hub]'") from error
    match = _ID.fullmatch(hub_id)
    if match is None:
        raise WeightsError(f"{hub_id}: no Hub id; write OWNER/NAME or OWNER/NAME@REVISION")
    repo, revision = match["repo"], match["revision"]
    try:
        if revision is None or not _COMMIT.fullmatch(revision):
            revision = HfApi(endpoint=endpoint).model_info(repo, revision=revision).sha
        # What a server answers ends up in paths and in messages; only a commit is taken for a commit.
        if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
            raise WeightsError(f"{hub_id}: the Hub names no commit for it; give OWNER/NAME@COMMIT")
        path = hf_hub_download(repo, FILE, revision=revision, endpoint=endpoint)
    except LocalEntryNotFoundError as error:
        raise WeightsError(f"{hub_id}: not in the local cache, and the Hub cannot be reached") from error
    except EntryNotFoundError as error:
        raise WeightsError(f"{hub_id}: the repository holds no {FILE}, and nothing else is opened") from error
    # A server that breaks off or an id that is none raises errors of the client underneath.
    except (HfHubHTTPError, OSError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise WeightsError(f"{hub_id}: the Hub does not give it ({reason})") from error
    return Path(path), f"{repo}@{revision}"
