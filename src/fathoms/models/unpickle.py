"""Read an untrusted .pth file in a subprocess without network, with limits on memory, time and file size.

Run as a script by `fathoms.models.pickled_weights` only: the arguments are the pickle and the file for the tensors. It
prints one line of JSON. Pickles are read with `weights_only=True`, which builds tensors and plain containers only.
Training arguments (argparse.Namespace) and numpy's numbers and arrays are read as plain data, by what stands in for
their classes here: nothing of argparse or numpy is called. The limits guard against faults in the reader itself.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import zipfile
from pathlib import Path
from typing import Any

_SHOWN = 20
MESSAGE = "this file wants to run code"


def limit(memory: int, seconds: int, size: int) -> None:
    """Limit this process: address space, CPU time, and the size of any file it writes."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def cut_network() -> None:
    """Make every socket an error; nothing here needs one."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no network while an untrusted file is open")

    socket.socket = refuse  # pyrefly: ignore
    socket.create_connection = refuse


def unpacked_size(path: Path) -> int:
    """Bytes that a file declares to unpack to; its own size if it is not an archive."""
    if not zipfile.is_zipfile(path):
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist())


class Namespace:
    """Stands in for argparse.Namespace, in which DeiT's and timm's checkpoints keep their arguments: names and values.

    Nothing of argparse is imported or called; a state that is not a plain dict is refused.
    """

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError("its training arguments are not names and values")
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self.__dict__)

    def __str__(self) -> str:
        return str(self.__dict__)


class Dtype:
    """Stands in for numpy.dtype: the code of a number's type, in this machine's byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code = str(code)

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, ...); the rest describes records and dates, whose codes are refused.
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "=", "|", None):
            raise ValueError("its numpy numbers are not in this machine's byte order")

    def values(self, data: Any) -> Any:
        import torch

        kinds = {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool", "u1": "uint8", "i1": "int8"}
        kinds |= {
            f"{sign}{size}": f"{'u' * (sign == 'u')}int{8 * size}" for sign in "iu" for size in (2, 4, 8)
        }
        if self.code not in kinds or type(data) is not bytes:
            raise ValueError(f"its numpy values of type {self.code[:20]!r} are not numbers")
        kind = getattr(torch, kinds[self.code])
        return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def number(dtype: Any, data: Any) -> Any:
    """Stands in for the function by which numpy builds a number: a Python number."""
    if type(dtype) is not Dtype:
        raise ValueError("a numpy number has no type")
    return dtype.values(data).item()


class Array:
    """Stands in for numpy.ndarray."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_column, data = state
        values = dtype.values(data).reshape(shape[::-1] if by_column else shape)
        self.tensor = values.permute(*reversed(range(len(shape)))) if by_column else values

    def __str__(self) -> str:
        return f"of shape {tuple(self.tensor.shape)}"


def array(*_: Any) -> Array:
    """Stands in for the function by which numpy builds an array, whose numbers come with its state."""
    return Array()


def no_bytes() -> bytes:
    """Stands in for `bytes`, as which old pickles write the contents of an empty array."""
    return b""


# What a checkpoint may ask for beyond torch's own list, and what it gets in its place.
INERT: list[Any] = [(Namespace, "argparse.Namespace"), (Dtype, "numpy.dtype"), (Array, "numpy.ndarray")]
INERT += [(no_bytes, f"{module}.bytes") for module in ("builtins", "__builtin__")]
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    INERT += [(number, f"{_module}.scalar"), (array, f"{_module}._reconstruct")]


class RefusedError(Exception):
    """The contents cannot be written as plain tensors; the message says why."""


def flatten(value: Any, path: str, tensors: dict[str, Any], others: dict[str, str]) -> None:
    """Sort the contents of a checkpoint into tensors and everything else, each under its path."""
    import torch

    if path in tensors or path == "__metadata__":
        raise RefusedError(f"{path[:80]!r} is the name of two things in it")
    value = getattr(value, "tensor", value) if type(value) is Array else value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise RefusedError(f"{path[:80]!r} is not a plain tensor")
        tensors[path] = value
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            flatten(item, f"{path}.{key}" if path else str(key), tensors, others)
    elif isinstance(value, list | tuple) and any(
        isinstance(item, torch.Tensor | dict | Array) for item in value
    ):
        for index, item in enumerate(value):
            flatten(item, f"{path}.{index}" if path else str(index), tensors, others)
    else:
        others[path] = f"{type(value).__name__} {_short(value)}"


def _short(value: Any) -> str:
    """The beginning of a value as text; Python refuses to print an integer of many thousand digits."""
    try:
        return str(value)[:60]
    except (ValueError, RecursionError):
        return "…"


def pick(checkpoint: Any, key: str) -> tuple[Any, str]:
    """The part of a checkpoint that holds a model's weights, and its key."""
    if key:
        for name in key.split("."):
            if not isinstance(checkpoint, dict) or name not in checkpoint:
                found = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, dict) else "no keys"
                raise KeyError(f"there is no {key!r} in it, but {found[:200]}")
            checkpoint = checkpoint[name]
        return checkpoint, key
    for name in ("model", "state_dict", "module", "model_state_dict"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(name), dict):
            return checkpoint[name], name
    return checkpoint, ""


def told(checkpoint: Any) -> dict[str, Any]:
    """What a checkpoint of timm, DeiT or a fork of theirs says of its model.

    That is the name, its images' preparation, and "arguments", which build another model than the name alone.
    """
    if not isinstance(checkpoint, dict):
        return {}
    args = checkpoint.get("args")
    known = vars(args) if type(args) is Namespace else args if isinstance(args, dict) else {}
    found: dict[str, Any] = {"model": checkpoint.get("arch") or known.get("model")}
    # DeiT calls the share of its crop eval_crop_ratio.
    crop = known.get("crop_pct") or known.get("eval_crop_ratio")
    found |= {"interpolation": known.get("interpolation"), "crop_pct": crop}
    kept: dict[str, Any] = {
        name: value for name, value in found.items() if value and type(value) in (str, float, int)
    }
    for name in ("mean", "std"):
        values = known.get(name)
        if isinstance(values, list | tuple) and all(type(value) in (float, int) for value in values):
            kept[name] = list(values)
    given = known.get("model_kwargs")
    pooled = {} if known.get("gp") is None else {"global_pool": known["gp"]}
    if arguments := {**pooled, **(given if isinstance(given, dict) else {})}:
        plain = (bool, int, float, str, type(None))
        kept["arguments"] = {
            str(name)[:80]: value if type(value) in plain else _short(value)
            for name, value in arguments.items()
        }
    return kept


def main(source: str, target: str, key: str, memory: str, seconds: str, size: str) -> dict[str, Any]:
    """Read, sort, write; returns a report, or an "error" with its reason."""
    path = Path(source)
    # Imported before the limits, so that only reading is limited.
    import torch
    from safetensors.torch import save_file

    cut_network()
    limit(int(memory), int(seconds), int(size))
    try:
        unpacked = unpacked_size(path)
        if unpacked > int(size):
            return {"error": f"it unpacks to {unpacked / 1e9:.1f} GB, more than --max-gb allows"}
        with torch.serialization.safe_globals(INERT):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    # An untrusted pickle raises anything; the report names it.
    except Exception as error:  # noqa: BLE001
        return {"error": _reason(error)}
    tensors: dict[str, Any] = {}
    others: dict[str, str] = {}
    try:
        state, taken = pick(checkpoint, key)
        flatten(state, "", tensors, others)
    except KeyError as error:
        return {"error": str(error.args[0])}
    except RefusedError as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "it contains itself, or is nested too deeply; it is not a checkpoint of a model"}
    # A tensor may be a view that repeats one number a billion times: tiny in this file, huge when written out.
    written = sum(value.numel() * value.element_size() for value in tensors.values())
    if written > int(size):
        return {"error": f"its tensors take {written / 1e9:.1f} GB, more than --max-gb allows"}
    top = (
        [f"{str(name)[:80]}: {_about(value)}" for name, value in list(checkpoint.items())[:_SHOWN]]
        if isinstance(checkpoint, dict)
        else []
    )
    if not tensors:
        return {"error": f"it holds no tensors ({'; '.join(top)[:200] or type(checkpoint).__name__})"}
    # Tensors that share memory are written separately: safetensors has no aliases.
    try:
        save_file(
            {name: value.contiguous().clone() for name, value in tensors.items()}, target, {"format": "pt"}
        )
    except Exception as error:  # noqa: BLE001
        return {"error": f"its tensors cannot be written ({type(error).__name__}: {str(error)[:120]})"}
    return {
        "tensors": len(tensors),
        "parameters": sum(value.numel() for value in tensors.values()),
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in tensors.values()}),
        "taken": taken,
        "told": told(checkpoint),
        "top": top,
        "left_out": [f"{name[:80]}: {about}" for name, about in list(others.items())[:_SHOWN]],
    }


def _about(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") and not isinstance(value, str) else ""
    return f"{type(value).__name__}{size}"


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than --max-gb allows"
    text = " ".join(str(error).split())
    if "weights_only" in text.lower() or "Unsupported" in text or "GLOBAL" in text:
        wanted = text.partition("GLOBAL ")[2].split(" ")[0]
        detail = f" (it asks for {wanted})" if wanted else ""
        return f"{MESSAGE} when it is opened{detail}; ask its author for safetensors"
    if "memory" in text.lower():
        return "it needs more memory than --max-gb allows"
    return f"it is not a readable checkpoint ({type(error).__name__}: {text[:120]})"


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
