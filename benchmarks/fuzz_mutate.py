"""Mutations of benchmarks/fuzz.py: bytes and values that readers fail on."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

WORDS = [
    0,
    1,
    -1,
    2**31,
    2**32 - 1,
    2**63,
    -(2**63),
    2**64 - 1,
    10**30,
    10**400,
    0.5,
    1e308,
    5e-324,
    -0.0,
    True,
    None,
    "",
    "x",
]
WORDS += ["../../x", "/etc/passwd", "\x1b[2J", "\ud800", [], {}, [[]], {"a": 1}, "os.system", "x" * 5000]
BYTES = [
    b"\x00",
    b"\xff",
    b"\n",
    b"\x1b[2J",
    b"..",
    b"/",
    b"[[[[",
    b"{",
    b'"',
    b"nan",
    b"9" * 40,
    b"\xff" * 8,
]


def damaged(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A file with one to four things wrong with it."""
    body = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, kind = rng.randrange(len(body) + 1), rng.randrange(8)
        end = min(len(body), place + rng.choice((1, 2, 4, 8, 64, 512)))
        if kind == 0:
            del body[place:]
        elif kind == 1:
            flip_bits(body, rng)
        elif kind == 2:
            del body[place:end]
        elif kind == 3:
            body[place:place] = body[place:end] * rng.choice((1, 2, 100))
        elif kind == 4:
            body[place:place] = rng.choice(BYTES) * rng.choice((1, 1, 1000))
        elif kind == 5:
            layout = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
            number = rng.choice((0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            packed = struct.pack(layout, number % 256 ** struct.calcsize(layout))
            body[place : place + len(packed)] = packed
        elif kind == 6:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            body[place:end] = other[start : start + end - place]
        else:
            body[place:end] = rng.randbytes(end - place)
    return bytes(body)


def flip_bits(body: bytearray, rng: random.Random) -> None:
    """Flip one to eight bits, in place."""
    for _ in range(rng.randint(1, 8)):
        if body:
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)


def changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with one entry replaced, doubled or taken out, anywhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return {**value, str(rng.choice(WORDS)): rng.choice(WORDS)}
        return {**value, key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value + value[:place]
        return [*value[:place], changed(value[place], rng), *value[place + 1 :]]
    return rng.choice(WORDS)


def as_json(value: Any) -> bytes:
    """JSON, with whatever Python writes for values that JSON lacks."""
    return json.dumps(value).encode()
