"""Counter-based random numbers: a draw depends on its key alone, not on the caller or on earlier draws.

A key is (seed, epoch, sample index, repeat, stream); draw k of a key is a hash of both. No state is
kept, so any worker, in any order, after any resume, gives one sample the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# The constants of splitmix64 (Steele, Lea and Flood 2014), whose output passes BigCrush.
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
# numpy takes its own scalars faster than it makes them.
_WORD = {value: np.uint64(value) for value in (11, 27, 30, 31, _GOLDEN, _MULTIPLY_1, _MULTIPLY_2)}

# Each use of randomness has a stream of its own, so that switching one augmentation on or off
# leaves the numbers of the others as they were.
_STREAMS = ("crop", "policy", "jitter", "erase", "mix", "replace", "noise", "order", "own")
STREAMS = {name: number for number, name in enumerate(_STREAMS, start=1)}


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, in place."""
    x ^= x >> _WORD[30]
    x *= _WORD[_MULTIPLY_1]
    x ^= x >> _WORD[27]
    x *= _WORD[_MULTIPLY_2]
    x ^= x >> _WORD[31]
    return x


def _as_words(values: np.ndarray | Sequence[int] | int) -> np.ndarray:
    return np.atleast_1d(np.asarray(values, dtype=np.int64)).astype(np.uint64)


def _absorb(key: np.ndarray, word: np.ndarray) -> np.ndarray:
    return _mix((key ^ word) + _WORD[_GOLDEN])


@functools.lru_cache(64)
def _epoch_key(seed: int, epoch: int, stream: str) -> np.ndarray:
    """The part of a key that all samples of an epoch share."""
    key = np.zeros(1, np.uint64)
    for word in (seed, epoch, STREAMS[stream]):
        key = _absorb(key, _as_words(word))
    return key


def sample_keys(
    seed: int,
    epoch: int,
    stream: str,
    index: np.ndarray | Sequence[int],
    repeat: np.ndarray | Sequence[int] | int = 0,
) -> np.ndarray:
    """One 64-bit key per sample, shape of `index`."""
    # Unsigned overflow is the arithmetic of the hash, not a mistake.
    with np.errstate(over="ignore"):
        return _absorb(_absorb(_epoch_key(seed, epoch, stream), _as_words(index)), _as_words(repeat))


def uniforms(keys: np.ndarray, count: int, first: int = 0) -> np.ndarray:
    """Draws `first` to `first + count` from [0, 1) of each key, shape (*keys.shape, count), float64."""
    with np.errstate(over="ignore"):
        steps = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _WORD[_GOLDEN]
        bits = _mix(keys[..., None] + steps)
    return (bits >> _WORD[11]).astype(np.float64) * 2.0**-53


def normals(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Standard normal draws from two uniform ones (Box and Muller)."""
    return np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second)


def generator(seed: int, epoch: int, stream: str, place: int = 0, second: int = 0) -> np.random.Generator:
    """A numpy generator for the draws of a whole batch or epoch."""
    return generators(seed, epoch, stream, [place], second)[0]


def generators(
    seed: int, epoch: int, stream: str, places: Sequence[int], second: int = 0
) -> list[np.random.Generator]:
    keys = sample_keys(seed, epoch, stream, places, second)
    return [np.random.Generator(np.random.Philox(key=int(key))) for key in keys]


# Views of another type must start at a multiple of its size; sixteen bytes also keep loads aligned.
_ALIGNMENT = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy small host arrays to the device in one transfer, without making the host wait.

    A transfer costs the host the same for a byte as for a megabyte, so all travel in one buffer and come
    out as views of it.
    """
    sizes = [array.nbytes for array in arrays]
    starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for array, start, size in zip(arrays, starts[:-1], sizes, strict=True):
        host[start : start + size].view(array.dtype).reshape(array.shape)[...] = array
    there = buffer.to(device, non_blocking=True)
    return [
        there[start : start + size].view(_torch_type(array.dtype)).view(array.shape)
        for array, start, size in zip(arrays, starts[:-1], sizes, strict=True)
    ]


def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
