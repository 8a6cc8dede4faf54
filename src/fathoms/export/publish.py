"""An exported model on the Hugging Face Hub: the file and its card, in one commit."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fathoms.export.export import Exported
from fathoms.models import hub

# What the Hub reads at the head of a card: how to find the model, and by what to load it.
_HEAD = "---\nlibrary_name: fathoms\npipeline_tag: image-classification\ntags:\n- vision-transformer\n---\n\n"


def publish(exported: Exported, repo: str, *, public: bool = False) -> str:
    """Push an exported model; gives OWNER/NAME@COMMIT, which loads it again.

    The file is called `model` there with the ending of its format, so that a safetensors file is what
    `load_trained`, `create_model(weights=...)` and `--checkpoint OWNER/NAME` look for.

    Args:
        exported: What was written here.
        repo: OWNER/NAME; made, if it is not there yet.
        public: Whether a repository that is made can be seen by everybody.
    """
    path = Path(exported.path)
    name = f"model{path.suffix}"
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder) / "README.md"
        readme.write_text(_HEAD + Path(exported.card).read_text())
        files = {name: path, f"{name}.json": path.with_name(f"{path.name}.json"), "README.md": readme}
        return hub.push(repo, files, public=public)
