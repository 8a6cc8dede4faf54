"""The header of a safetensors file, read strictly before anything is loaded, and a model that fits it.

The format's own reader checks lengths, offsets and types. It keeps the last of two entries of one name, and it
cannot know how large a model the accompanying config describes; those two are looked at here.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fathoms.errors import WeightsError, reason
from fathoms.models.config import ViTConfig
from fathoms.models.vit import ViT

# A header names each tensor in about 100 bytes. safetensors' own limit is 100 MB, which takes a gigabyte of
# memory to parse.
MAX_HEADER = 16 << 20
# Numbers that a model may hold beyond its weights file: positions of a larger image, rotation tables.
_ROOM = 1 << 26


def check_header(path: Path, name: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a weights file; another kind of file, or a header that lies, is an error."""
    if not path.is_file():
        raise WeightsError(f"{name}: no such file; give a .safetensors file or a Hub id such as timm/NAME")
    if path.suffix != ".safetensors":
        raise WeightsError(
            f"{name}: only .safetensors files are opened, since others can run code when loaded; "
            "turn a .pth into one with `fathoms convert`"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise _unreadable(name, f"its header of {length} bytes is not within the file's {size}")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_unknown)
        if not isinstance(header, dict):
            raise ValueError("its header is no table")
        entries = {key: value for key, value in header.items() if key != "__metadata__"}
        return {key: _shape(value) for key, value in entries.items()}
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, reason(error)) from error


def _unreadable(name: str, why: str) -> WeightsError:
    return WeightsError(f"{name}: not a readable safetensors file ({why}); fetch it again")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return table


def _unknown(name: str) -> Any:
    raise ValueError(f"{name} in its header")


def _shape(entry: Any) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError("an entry of its header has no shape")
    return tuple(shape)


def build_for(config: ViTConfig, path: str | Path) -> ViT:
    """A model for a weights file, after looking whether the file can fill it.

    A config from a stranger may describe a model that fills the machine. Without a byte of memory for it, its
    size is compared with that of its file; the file itself is read by `load_weights`.
    """
    shapes = check_header(Path(path), str(path))
    held = sum(math.prod(shape) for shape in shapes.values())
    blocks = config.depth + (config.class_attention_depth if config.readout == "class_attention" else 0)
    if blocks > len(shapes):
        raise WeightsError(f"{path}: holds {len(shapes)} tensors, too few for a model of {blocks} blocks")
    with torch.device("meta"):
        described = ViT(config)
    check_size(described, held, path)
    return ViT(config)


def check_size(described: nn.Module, held: int, path: str | Path) -> None:
    """Refuse a model, built without memory on the meta device, that is far larger than its weights file."""
    needed = sum(value.numel() for value in [*described.parameters(), *described.buffers()])
    if needed > 2 * held + _ROOM:
        raise WeightsError(
            f"{path}: holds {held:,} numbers, but the config describes a model of {needed:,}; "
            "they do not belong together"
        )
