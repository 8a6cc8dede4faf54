"""Write safetensors files straight from host memory, hashing on the way.

The safetensors package copies every tensor and holds Python's lock while it writes, which would stop the training
thread that saving must not disturb. The format is a length, a JSON header and the bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK = 8 << 20


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write contiguous host tensors, flush them to the disk, and return the SHA-256 of the file."""
    # Wide types first, so that every tensor is aligned; the order of the safetensors package.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        kind, shape = NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        pieces = [memoryview(struct.pack("<Q", len(text)) + text)]
        pieces += [_bytes(tensors[name]) for name in names]
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                part = piece[start : start + CHUNK]
                digest.update(part)
                while part:
                    part = part[file.write(part) or 0 :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
