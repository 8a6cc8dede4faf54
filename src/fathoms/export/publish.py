"""Push an exported model and its card to the Hugging Face Hub, in one commit."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fathoms.export.export import Exported
from fathoms.models import hub

# Metadata that the Hub reads from the top of a card, for its search and its code snippets.
_HEAD = "---\nlibrary_name: fathoms\npipeline_tag: image-classification\ntags:\n- vision-transformer\n---\n\n"


def publish(exported: Exported, repo: str, *, public: bool = False) -> str:
    """Push an exported model; returns hf-hub:OWNER/NAME@COMMIT, which loads it again.

    The file is called `model` there with the ending of its format, so that a safetensors file is what
    `load_run`, `create_model(weights=...)` and `--checkpoint hf-hub:OWNER/NAME` look for.

    Args:
        exported: The local files.
        repo: OWNER/NAME; created if it does not exist.
        public: Whether a newly created repository is public.
    """
    path = Path(exported.path)
    name = f"model{path.suffix}"
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder) / "README.md"
        readme.write_text(_HEAD + Path(exported.card).read_text())
        files = {name: path, f"{name}.json": path.with_name(f"{path.name}.json"), "README.md": readme}
        return hub.push(repo, files, public=public)
