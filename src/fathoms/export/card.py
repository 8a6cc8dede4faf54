"""The card that lies beside an exported model: what it is, how it was checked, how it is loaded."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fathoms.atomic import write_atomic


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def facts(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """What a card says, as plain data."""
    versions = {
        "fathoms": version("fathoms"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {
        "file": path.name,
        "sha256": digest(path),
        "bytes": path.stat().st_size,
        **told,
        "versions": versions,
    }


def write_card(path: Path, told: dict[str, Any]) -> tuple[Path, Path]:
    """Write the card as JSON and as Markdown beside the file."""
    card = facts(path, told)
    as_json, as_text = path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.md")
    write_atomic(as_json, (json.dumps(card, indent=2) + "\n").encode())
    write_atomic(as_text, markdown(card).encode())
    return as_json, as_text


def markdown(card: dict[str, Any]) -> str:
    """The card for people."""
    fields = "\n".join(f"| {name} | {_cell(value)} |" for name, value in card["config"].items())
    gaps = ", ".join(f"{gap:.2g} at batch {batch}" for batch, gap in card["differences"].items())
    folded = (
        "" if card["folded"] is None else f" {card['folded']} scales and shifts are folded into its matrices."
    )
    return (
        f"# {_cell(card['model'])}\n\n"
        f"`{card['file']}`, {card['format']}, {card['parameters']:,} parameters, {card['bytes']:,} bytes.{folded}\n"
        f"Largest difference from the original, over its largest output: {gaps}.\n\n"
        f"sha256 `{card['sha256']}`\n\n"
        f"Input: images (B, {card['input'][0]}, {card['input'][1]}, {card['input'][2]}), any B. "
        f"Output: logits (B, {card['config'].get('num_classes')}).\n\n"
        f"| field | value |\n|---|---|\n{fields}\n"
    )


def _cell(value: Any) -> str:
    """A value that cannot break out of a table."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
