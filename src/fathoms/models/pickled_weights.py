"""Untrusted .pth files as safetensors, without opening them in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathoms.errors import ConfigError, WeightsError, flag_of
from fathoms.files import replacing

PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Endings of files of weights that torch.save wrote; timm's are called .pth.tar."""
# Entries with averaged (EMA) weights in the checkpoints of timm, DeiT and their forks.
_AVERAGED = ("state_dict_ema", "model_ema", "ema")
# Torch itself maps several gigabytes of address space before it has read anything.
_TORCH_BYTES = 8 << 30
# Least and most of each limit; the system takes a negative one for none at all.
_LIMITS = {"max_gb": (1e-3, 10**6), "seconds": (1, 10**9)}


@dataclass(frozen=True)
class Converted:
    """Contents of the converted file.

    Args:
        target: The safetensors file.
        tensors: Number of tensors.
        parameters: Number of elements.
        dtypes: Their dtypes.
        taken: The key of the checkpoint whose tensors were taken; "" for the whole checkpoint.
        top: The checkpoint's top-level keys and their types.
        left_out: Entries that are not tensors, and were not written.
        told: What the file says of its model: name, mean, std, crop_pct, interpolation, and arguments that change it.
    """

    target: str
    tensors: int
    parameters: int
    dtypes: tuple[str, ...]
    taken: str
    top: tuple[str, ...]
    left_out: tuple[str, ...]
    told: dict[str, Any]


def convert(
    source: str | Path, target: str | Path, *, key: str = "", max_gb: float = 16.0, seconds: int = 300
) -> Converted:
    """Read a .pth, .pt or .bin file weights-only, in another process with limits, and write its tensors.

    Args:
        source: The file; a pickle of anything but tensors and plain containers is refused.
        target: Where the .safetensors file goes, whole or not at all.
        key: Entry of the checkpoint to take, such as "model" or "ema.module"; "" finds the model.
        max_gb: Limit on the memory for the contents, and on the size of the file written, in GB.
        seconds: Limit on CPU time.
    """
    source, target = Path(source), Path(target)
    _check(source, target)
    for name, value in {"max_gb": max_gb, "seconds": seconds}.items():
        least, most = _LIMITS[name]
        if not least <= value <= most:
            raise ConfigError(f"{flag_of(name)} {value}: use {least} to {most}")
    with replacing(target) as temporary:
        found = _read_in_subprocess(source, temporary, key, int(max_gb * 1e9), seconds)
    lists = {name: tuple(found[name]) for name in ("dtypes", "top", "left_out")}
    return Converted(
        str(target), found["tensors"], found["parameters"], taken=found["taken"], told=found["told"], **lists
    )


def is_pickled(path: str | Path) -> bool:
    """Whether a path names an existing file that torch.save wrote."""
    return Path(path).suffix in PICKLED and Path(path).is_file()


@contextmanager
def as_safetensors(source: Path, averaged: bool | None = None) -> Iterator[tuple[Path, Converted, str]]:
    """A .pth file as safetensors for the length of a block, what was found in it, and a line about it.

    Args:
        source: The file.
        averaged: Whether its averaged (EMA) weights are taken; None is False, as in timm's own validate.py.
    """
    with tempfile.TemporaryDirectory(prefix="fathoms-") as folder:
        target = Path(folder) / "weights.safetensors"
        found = convert(source, target)
        average = next(
            (key for key in _AVERAGED if any(line.startswith(f"{key}: ") for line in found.top)), None
        )
        line = f"{source}: converted on the way, its {found.taken or 'whole content'}"
        if averaged and average is None:
            raise WeightsError(f"--use-ema: {source}: holds no averaged weights; leave it out")
        if averaged:
            found = convert(source, target, key=average or "")
            line = f"{source}: converted on the way, its {average}"
        elif average is not None:
            line += f"; --use-ema takes its {average}"
        try:
            yield target, found, line
        except WeightsError as error:
            error.args = (str(error).replace(str(target), str(source)),)
            raise


def _check(source: Path, target: Path) -> None:
    if not source.is_file():
        raise WeightsError(f"{source}: no such file; give a .pth, .pt or .bin file")
    if source.suffix == ".safetensors":
        raise WeightsError(f"{source}: this is already a safetensors file; load it as it is")
    if target.suffix != ".safetensors":
        raise WeightsError(f"{target}: weights are written as .safetensors; change the ending")
    if not target.parent.is_dir():
        raise WeightsError(f"{target}: the folder does not exist; create it first")


def _read_in_subprocess(source: Path, target: Path, key: str, size: int, seconds: int) -> dict[str, Any]:
    """Run the reader; its report, or an error with the reason."""
    script = Path(__file__).with_name("unpickle.py")
    # -I: no PYTHON* variables, no user site, no current folder on the path. No other variable is passed on.
    limits = [str(_TORCH_BYTES + 3 * size), str(seconds), str(size)]
    command = [sys.executable, "-I", str(script), str(source.resolve()), str(target.resolve()), key, *limits]
    environment = {
        "PATH": os.defpath,
        "OMP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=2 * seconds + 60, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"{source}: it could not be read in time; raise --seconds") from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise WeightsError(
            f"{source}: reading it failed under the limits ({last[:160]}); raise --max-gb or --seconds"
        )
    report = json.loads(lines[-1])
    # The untrusted file decides the names in this report, not its structure.
    if "error" in report:
        raise WeightsError(f"{source}: {report['error']}")
    return report
