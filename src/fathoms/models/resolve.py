"""The model that a text names: an existing path, a model of the zoo, timm/NAME, or hf-hub:OWNER/NAME, in this order.

Nothing else is looked up anywhere: a misspelt path is answered here, without a request to the network. Importing this
file imports neither torch nor timm.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fathoms.errors import WeightsError
from fathoms.files.nearest_path import missing
from fathoms.models import hub
from fathoms.models.build_timm import TIMM
from fathoms.models.zoo import ALIASES, MODELS
from fathoms.names.registry import nearest

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
        """The existing file or folder."""
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
    if text.startswith(hub.PREFIX):
        hub.check_id(text, where)
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
            f"for weights on the Hub write {hub.PREFIX}timm/{name}"
        )
    return found


def resolve_weights(text: str, where: str = "") -> NamedModel:
    """The weights that a text names, to load into a model: a path, or a repository; timm/NAME is timm's own there."""
    if text.startswith(TIMM) and hub.is_id(text) and not os.path.exists(text):  # noqa: PTH110
        text = hub.PREFIX + text
    return resolve_trained(text, where)


def refuse_weights(text: str, where: str) -> None:
    """Refuse what names weights, where an architecture is asked for; other unknown names are left to their family."""
    is_path = text not in MODELS and text not in ALIASES and os.path.exists(text)  # noqa: PTH110
    if is_path or text.startswith(hub.PREFIX) or _is_file_name(text):
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
        return f"{text}: pages are not read; write {hub.PREFIX}{page[1]}"
    otherwise = f"give {forms}"
    if "/" not in text and not _is_file_name(text):
        # Who takes other forms takes no architecture.
        near = nearest(text, [*MODELS, *ALIASES]) if forms == _FORMS else None
        otherwise = f"did you mean the model {near!r}?" if near else otherwise
    elif hub.is_id(text) and not _is_file_name(text):
        otherwise = f"for a repository of the Hub write {hub.PREFIX}{text}"
    return missing(text, otherwise)
