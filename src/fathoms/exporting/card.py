"""The card of an exported model, as JSON and Markdown: origin, verification, input, preprocessing, classes."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fathoms.evaluating.load import LoadedModel
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.files import write_atomic
from fathoms.surgery.inputs import image_shape
from fathoms.untrusted import sha256_of
from fathoms.version import __version__


def facts(path: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """The card as plain data: the given entries with the file's hash and the versions."""
    versions = {
        "fathoms": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        "bytes": path.stat().st_size,
        **entries,
        "versions": versions,
    }


def preprocessing_facts(preprocessing: Preprocessing, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Every step from an image file to the model's input, for images of (channels, height, width).

    Whoever follows them with Pillow and numpy has the tensor that `fathoms predict` feeds the model.
    """
    channels, size, _ = shape
    short = math.floor(size / preprocessing.crop(size))
    used = "RGB" if channels == 3 else _channels(channels)
    steps = [
        "decode to RGB, 8 bits, turned as the EXIF orientation says",
        *(["replace R, G and B by their mean, rounded to 8 bits"] if channels == 1 else []),
        f"resize the shorter side to {short} pixels and the longer one in proportion (rounded down), "
        f"{preprocessing.interpolation} with antialiasing",
        f"cut the {size} x {size} pixels in the middle",
        "divide by 255, subtract mean, divide by std, per channel",
        f"order (channel, row, column), float32; channels: {used}",
    ]
    return {
        **preprocessing.at(size).to_dict(),
        "resize_shorter_side": short,
        "crop": [size, size],
        "antialias": True,
        "divide_by": 255,
        "channels": used,
        "steps": steps,
    }


def _channels(channels: int) -> str:
    return (
        "the first of three that are grey, with the first mean and std"
        if channels == 1
        else f"the first {channels} of RGB"
    )


def card_files(path: Path) -> tuple[Path, Path]:
    """The card of a file, as JSON and as Markdown."""
    return path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.md")


def write_card(path: Path, entries: dict[str, Any]) -> tuple[Path, Path]:
    """Write the card as JSON and as Markdown next to the file."""
    card = facts(path, entries)
    as_json, as_text = card_files(path)
    write_atomic(as_json, (json.dumps(card, indent=2) + "\n").encode())
    write_atomic(as_text, markdown(card).encode())
    return as_json, as_text


def markdown(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    gaps = ", ".join(f"{gap:.2g} at batch {batch}" for batch, gap in card["differences"].items())
    faster, folded = card.get("accelerated"), card["folded"]
    changes = f" {faster} modules are replaced by faster ones." if faster else ""
    changes += f" {folded} scales and shifts are folded into the matrices." if folded is not None else ""
    size = f"{card['parameters']:,} parameters, {card['bytes']:,} bytes"
    channels, height, width = card["input"]
    lines = [
        f"# {_cell(card['file'])}: {_cell(card['model'])}",
        "",
        f"{card['format']}, {size}.{changes}",
        f"Largest difference from the original, over its largest output: {gaps}.",
        *_int8(card.get("int8")),
        "",
        f"sha256 `{card['sha256']}`",
        "",
        f"Input: images (B, {channels}, {height}, {width}), any B. "
        f"Output: logits (B, {card['config']['num_classes']}).",
    ]
    if card["format"] in ("onnx", "openvino", "safetensors"):
        lines += [
            "",
            f"`fathoms predict PHOTOS --checkpoint {_cell(card['file'])}` classifies images with it.",
        ]
    for title in ("preprocessing", "metrics", "config", "recipe"):
        lines += _table(title, card.get(title) or {})
    if card.get("classes"):
        lines += ["", "## classes", "", ", ".join(map(_cell, card["classes"]))]
    return "\n".join([*lines, ""])


def hub_page(path: Path, format: str) -> str:
    """The README of a repository: the card, and above it what the Hub reads for its search and its leaderboards."""
    card = json.loads(card_files(path)[0].read_text())
    head: dict[str, Any] = {"library_name": "timm" if format == "timm" else "fathoms"}
    head |= {"pipeline_tag": "image-classification", "tags": ["vision-transformer"]}
    if result := _model_index(card):
        head["model-index"] = [{"name": str(card["model"]), "results": [result]}]
    # JSON is YAML.
    rows = [f"{name}: {json.dumps(value)}" for name, value in head.items()]
    return "\n".join(["---", *rows, "---", "", markdown(card)])


def _model_index(card: dict[str, Any]) -> dict[str, Any] | None:
    """The measured accuracies as the Hub's `model-index` has them; None where nothing was measured."""
    metrics = card.get("metrics") or {}
    split = next((name for name in ("test", "best", "last") if (metrics.get(name) or {}).get("top1")), None)
    if split is None:
        return None
    names = {"top1": "Top-1 accuracy (%)", "top5": "Top-5 accuracy (%)"}
    found = [
        {
            "type": "accuracy" if key == "top1" else "top_5_accuracy",
            "name": name,
            "value": metrics[split][key],
        }
        for key, name in names.items()
        if metrics[split].get(key) is not None
    ]
    data = Path(str(card.get("data") or "unknown")).name
    dataset = {"name": data, "type": data, "split": "test" if split == "test" else "val"}
    return {"task": {"type": "image-classification"}, "dataset": dataset, "metrics": found}


def _int8(result: dict[str, Any] | None) -> list[str]:
    """Sentences on size and accuracy before and after int8."""
    if result is None:
        return []
    (before, after), (large, small) = result["top1"], result["bytes"]
    return [
        f"The matrices are int8: {small:,} bytes instead of {large:,}, top1 {after:.2f} % instead of "
        f"{before:.2f} % on {result['images']:,} images ({_cell(result['data'])}). The differences above are "
        "those before quantisation.",
        *(f"{_cell(sentence)}." for sentence in result["kept"]),
    ]


def _table(title: str, values: dict[str, Any]) -> list[str]:
    """A section with a table of the values that are not None."""
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in _flat(values) if value is not None]
    return ["", f"## {title}", "", "| field | value |", "|---|---|", *rows] if rows else []


def _flat(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values; those of nested tables as "table.name"."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        elif name == "steps":
            yield from ((f"step {number}", step) for number, step in enumerate(value, 1))
        else:
            yield f"{path}{name}", f"{value:.6g}" if isinstance(value, float) else value


def _cell(value: Any) -> str:
    """A value that cannot break out of a table."""
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def card_entries(loaded: LoadedModel) -> dict[str, object]:
    """Entries of the card beyond the config."""
    return {
        "weights": loaded.source,
        "classes": loaded.classes,
        "preprocessing": preprocessing_facts(loaded.preprocessing, image_shape(loaded.model)),
        "data": loaded.data,
        "recipe": loaded.recipe,
        "metrics": loaded.metrics,
    }


def instead_of_weights(model: nn.Module, twin: nn.Module | None) -> str:
    """What to do about weights that fit no model of the config or the name, by the first norm that is another one."""
    theirs = {} if twin is None else {path: type(module) for path, module in twin.named_modules()}
    for path, module in model.named_modules():
        other = theirs.get(path, type(module))
        # A folded norm is left without parameters, a swapped one has others.
        if type(module) is not other and "norm" in path and next(module.parameters(), None) is not None:
            swap = f"{type(module).__name__} in the place of {other.__name__}"
            return f"{path} is {swap}, as --swap-norms makes it; use onnx or torch-export"
    return "use onnx or torch-export, or leave --fold out"
