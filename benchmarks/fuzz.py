"""Feed mutated files to every reader of strangers' files: recipes, checkpoints, pictures, archives, arrays.

    python benchmarks/fuzz.py --cases 100000 --json

Each case takes a good file, damages it (bits, bytes, pieces, numbers and values that readers trip over) and opens it
as the library would. It may be read or refused with a `FathomsError`; anything else is a finding: another exception,
a crash of the process, a case of more than five seconds, a file left behind, memory beyond the limit. Case N of a
target is the same on every machine: `--only TARGET --first N --cases 1` repeats it.

Cases run in a child process, two thousand at a time, so that a crash is counted and named and the rest goes on.

Exit status: 0 nothing was found, 1 something was.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import faulthandler
import hashlib
import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.data import choose_decoder, open_source
from fathoms.data.manifest import verify_manifest
from fathoms.train import checkpoint as checkpoints
from fathoms.train.recipe import Recipe
from fathoms.train.recipe_file import read_recipe, recipe_names, recipe_options
from fathoms.train.toml import to_toml

CHUNK = 2000
HANG = 5.0
# What a child may take beyond what it holds when it starts.
ROOM = 2 << 30
MAX_PIXELS = 1 << 22

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
    0.5,
    1e308,
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


class HangError(BaseException):
    """A case that takes too long; no reader's `except Exception` catches it."""


def damaged(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A file with one to four things wrong with it."""
    body = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, kind = rng.randrange(len(body) + 1), rng.randrange(8)
        end = min(len(body), place + rng.choice((1, 2, 4, 8, 64, 512)))
        if kind == 0:
            del body[place:]
        elif kind == 1:
            for _ in range(rng.randint(1, 8)):
                if body:
                    body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del body[place:end]
        elif kind == 3:
            body[place:place] = body[place:end] * rng.choice((1, 2, 100))
        elif kind == 4:
            body[place:place] = rng.choice(BYTES) * rng.choice((1, 1, 1000))
        elif kind == 5:
            form = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
            number = rng.choice((0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            packed = struct.pack(form, number % 256 ** struct.calcsize(form))
            body[place : place + len(packed)] = packed
        elif kind == 6:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            body[place:end] = other[start : start + end - place]
        else:
            body[place:end] = rng.randbytes(end - place)
    return bytes(body)


def bent(value: Any, rng: random.Random) -> Any:
    """A JSON value with one entry replaced, doubled or taken out, anywhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return {**value, str(rng.choice(WORDS)): rng.choice(WORDS)}
        return {**value, key: bent(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value + value[:place]
        return [*value[:place], bent(value[place], rng), *value[place + 1 :]]
    return rng.choice(WORDS)


def as_json(value: Any) -> bytes:
    """JSON, with whatever Python writes for what is none."""
    return json.dumps(value).encode()


def joined(files: dict[str, bytes]) -> bytes:
    """Several files as one."""
    parts = [struct.pack("<HI", len(name), len(data)) + name.encode() + data for name, data in files.items()]
    return b"".join(parts)


def split(data: bytes) -> dict[str, bytes]:
    """The inverse of `joined`."""
    files, place = {}, 0
    while place < len(data):
        name, size = struct.unpack_from("<HI", data, place)
        start = place + 6 + name
        files[data[place + 6 : start].decode()] = data[start : start + size]
        place = start + size
    return files


class Recipes:
    """TOML recipes and model tables."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "recipe.toml"
        self.tables = [read_recipe(name) for name in recipe_names()]
        self.texts = [to_toml(table).encode() for table in self.tables]
        self.good = self.texts[0]

    def make(self, rng: random.Random) -> bytes:
        """A recipe with a value bent, or its text damaged."""
        if rng.random() < 0.5:
            with contextlib.suppress(Exception):
                return to_toml(bent(rng.choice(self.tables), rng)).encode("utf-8", "surrogatepass")
        return damaged(rng.choice(self.texts), rng, self.texts)

    def read(self, data: bytes) -> None:
        """Read it as `fathoms train --recipe` does."""
        self.path.write_bytes(data)
        table = read_recipe(str(self.path))
        model = {key: value for key, value in table.get("model", {}).items() if key != "name"}
        Recipe.join(recipe_options(table, str(self.path)), {})
        ViTConfig().replace(**model)


class Weights:
    """Safetensors files, given to a model."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        config = ViTConfig(image_size=8, patch_size=4, dim=8, heads=2, depth=1, num_classes=3)
        torch.manual_seed(0)
        self.model = ViT(config)
        fathoms.save_weights(self.model, self.path)
        self.files = [self.path.read_bytes()]
        fathoms.save_weights(self.model, self.path, layout="timm")
        self.files.append(self.path.read_bytes())
        self.good = self.files[1]

    def make(self, rng: random.Random) -> bytes:
        """The header bent, the header damaged, or the file damaged."""
        file = rng.choice(self.files)
        (length,) = struct.unpack("<Q", file[:8])
        header, body = file[8 : 8 + length], file[8 + length :]
        kind = rng.random()
        if kind < 0.45:
            header = as_json(bent(json.loads(header), rng))
        elif kind < 0.9:
            header = damaged(header, rng, [header])
        else:
            return damaged(file, rng, self.files)
        return struct.pack("<Q", len(header)) + header + body

    def read(self, data: bytes) -> None:
        """Load it."""
        self.path.write_bytes(data)
        fathoms.load_weights(self.model, self.path)


class Checkpoints:
    """Checkpoint folders of a run: manifest and state; half of them with the hashes put right again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        state: dict[str, Any] = {"epoch": 1, "step": 2, "updates": 3, "best": None, "last": {"top1": 1.0}}
        state |= {"seconds": 1.5, "sums": [[1.0, 2.0, 3.0, 4.0]], "lines": {"metrics.jsonl": 10}}
        state |= {
            "identity": {"recipe": {"lr": 0.1}},
            "data": "ab",
            "scaler": {},
            "classes": ["a"],
            "world": 1,
            "steps": 5,
        }
        state["guard"] = dict.fromkeys(("skipped", "in_a_row", "overflows", "rollbacks", "jumps"), 0)
        state["guard"] |= {"passed_over": [], "losses": [1.0]}
        state["optimizer"] = {"optimizer": "AdamW", "parameters": {"w": ["step"]}, "numbers": {}}
        self.tensors = {"model": {"w": torch.ones(3)}, "optimizer": {"exp_avg/w": torch.ones(3)}}
        checkpoints.write(self.folder, checkpoints.Checkpoint(self.tensors, state))
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.good = joined(self.files)

    def make(self, rng: random.Random) -> bytes:
        """One of the files bent or damaged, as the JSON of all of them."""
        files = dict(self.files)
        name = rng.choice(("state.json", "state.json", "manifest.json", "model.safetensors"))
        if name.endswith(".json") and rng.random() < 0.6:
            files[name] = as_json(bent(json.loads(files[name]), rng))
        else:
            files[name] = damaged(files[name], rng, list(files.values()))
        if name != "manifest.json" and rng.random() < 0.8:
            manifest = json.loads(files["manifest.json"])
            manifest[name] = hashlib.sha256(files[name]).hexdigest()
            files["manifest.json"] = as_json(manifest)
        return joined(files)

    def read(self, data: bytes) -> None:
        """Read it as a run that goes on does."""
        for name, content in split(data).items():
            (self.folder / name).write_bytes(content)
        checkpoints.read(self.folder)


class Pictures:
    """JPEG, PNG, GIF, WebP and BMP, plain and with what a file may carry, by every decoder."""

    def __init__(self, _folder: Path) -> None:
        rng = np.random.default_rng(0)
        image = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)).resize((60, 44))
        exif = Image.Exif()
        exif[0x0112] = 6
        forms: list[tuple[str, Image.Image, dict[str, Any]]] = [
            ("JPEG", image, {"exif": exif, "icc_profile": bytes(500)}),
            ("JPEG", image, {"progressive": True, "subsampling": 0}),
            ("JPEG", image.convert("CMYK"), {}),
            ("JPEG", image.convert("L"), {}),
            ("PNG", image, {"exif": exif}),
            ("PNG", image.convert("P"), {"transparency": 3}),
            ("PNG", image.convert("RGBA"), {"save_all": True, "append_images": [image.convert("RGBA")]}),
            ("PNG", Image.fromarray(np.arange(2640, dtype=np.uint16).reshape(44, 60)), {}),
            ("GIF", image, {"save_all": True, "append_images": [image.rotate(90)]}),
            ("WEBP", image, {"exif": exif}),
            ("WEBP", image, {"save_all": True, "append_images": [image.rotate(90)]}),
            ("BMP", image, {}),
            ("BMP", image.convert("1"), {}),
        ]
        self.files = []
        for kind, picture, options in forms:
            buffer = io.BytesIO()
            picture.save(buffer, kind, **options)
            self.files.append(buffer.getvalue())
        self.good = self.files[0]
        self.decoders = [
            choose_decoder(name, max_pixels=MAX_PIXELS) for name in ("auto", "simplejpeg", "pillow")
        ]

    def make(self, rng: random.Random) -> bytes:
        """A damaged picture; a PNG's checksums are put right again half of the time."""
        data = damaged(rng.choice(self.files), rng, self.files)
        return with_checksums(data) if data[:4] == b"\x89PNG" and rng.random() < 0.5 else data

    def read(self, data: bytes) -> None:
        """Header, a crop and the whole, by the decoder that the bytes choose."""
        decoder = self.decoders[zlib.crc32(data) % len(self.decoders)]
        header = decoder.header(data)
        height, width = header.shown
        decoder.decode(data, (height // 3, width // 3, height - height // 3, width - width // 3), header)
        decoder.decode(data, header=header)


def with_checksums(data: bytes) -> bytes:
    """A PNG whose pieces have the checksums that belong to them, so that a reader looks inside."""
    fixed, place = data[:8], 8
    while place + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        piece = data[place + 4 : place + 8 + length]
        fixed += data[place : place + 4] + piece + struct.pack(">I", zlib.crc32(piece))
        place += 12 + length
    return fixed + data[place:]


class Archives:
    """Tar files: an image folder, WebDataset samples, long names in GNU's and in POSIX' form."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "set.tar"
        names = [["train/a/0.jpg", "train/b/1.jpg", "val/a/2.jpg"], ["0.jpg", "0.cls", "1.jpg", "1.cls"]]
        names.append(["train/" + "long" * 40 + "/0.jpg", "train/ä/1.jpg"])
        self.files = []
        for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            for listed in names[: 2 if form == tarfile.USTAR_FORMAT else 3]:
                with tarfile.open(self.path, "w", format=form) as archive:
                    for name in listed:
                        info = tarfile.TarInfo(name)
                        info.size = 3 if name.endswith(".cls") else 700
                        archive.addfile(info, io.BytesIO(b"7  " if info.size == 3 else b"p" * 700))
                data = self.path.read_bytes().rstrip(b"\0")
                # tar pads to ten kilobytes, which would take most of the damage.
                self.files.append(data + bytes(-len(data) % 512 + 1024))
        self.good = self.files[0]

    def make(self, rng: random.Random) -> bytes:
        """A damaged archive; most headers get their checksums put right again."""
        data = bytearray(damaged(rng.choice(self.files), rng, self.files))
        if rng.random() < 0.7:
            for place in range(0, len(data) - 511, 512):
                block = data[place : place + 512]
                if b"ustar" in block[255:270]:
                    block[148:156] = b" " * 8
                    data[place + 148 : place + 156] = f"{sum(block):06o}\0 ".encode()
        return bytes(data)

    def read(self, data: bytes) -> None:
        """Open it and read every member."""
        self.path.write_bytes(data)
        source = open_source(self.path)
        for index in range(len(source)):
            source.read(index)


class Arrays:
    """.npz files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "set.npz"
        self.files = []
        for save in (np.savez, np.savez_compressed):
            images, labels = np.zeros((6, 4, 4, 3), np.uint8), np.arange(6) % 3
            save(self.path, x_train=images, y_train=labels, classes=np.array(["a", "b", "c"]))
            self.files.append(self.path.read_bytes())
        self.good = self.files[0]
        with zipfile.ZipFile(self.path) as archive:
            self.members = {name: archive.read(name) for name in archive.namelist()}

    def make(self, rng: random.Random) -> bytes:
        """A damaged file, or a damaged array in a file whose checksums are right."""
        if rng.random() < 0.3:
            return damaged(rng.choice(self.files), rng, self.files)
        members = dict(self.members)
        name = rng.choice(list(members))
        members[name] = damaged(members[name], rng, list(members.values()))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return buffer.getvalue()

    def read(self, data: bytes) -> None:
        """Open it."""
        self.path.write_bytes(data)
        open_source(self.path)


class Indices:
    """The JSON beside data: a pack's index and table, and the manifest of a check."""

    def __init__(self, folder: Path) -> None:
        self.pack = folder / "pack"
        self.pack.mkdir()
        (self.pack / "train-000000.tar").write_bytes(bytes(2048))
        shard = {"name": "train-000000.tar", "bytes": 2048, "sha256": "00", "count": 2}
        index = {"format": "fathoms-pack-1", "classes": ["a", "b"], "splits": {"train": {"shards": [shard]}}}
        side = {"samples": [["0.jpg", 0, 0, 10], ["1.jpg", 1, 512, 20]]}
        facts = {"classes": ["a", "b"], "fingerprint": "0", "files": [["x!0.jpg", 10, 0, "0"]], "bad": []}
        manifest = {"format": "fathoms-manifest-1", "splits": {"train": facts}}
        self.names = ("index.json", "train-000000.json", "manifest.json")
        self.tables = dict(zip(self.names, (index, side, manifest), strict=True))
        for name in self.names[:2]:
            (self.pack / name).write_bytes(as_json(self.tables[name]))
        facts["fingerprint"] = open_source(self.pack, kind="pack").fingerprint()
        self.good = bytes([0]) + as_json(index)

    def make(self, rng: random.Random) -> bytes:
        """One of the files bent or damaged; its number comes first."""
        number = rng.randrange(3)
        good = self.tables[self.names[number]]
        text = (
            as_json(bent(good, rng)) if rng.random() < 0.7 else damaged(as_json(good), rng, [as_json(good)])
        )
        return bytes([number]) + text

    def read(self, data: bytes) -> None:
        """Open the pack and read its samples, and compare it with the manifest."""
        for name, good in self.tables.items():
            (self.pack / name).write_bytes(as_json(good))
        (self.pack / self.names[data[0]]).write_bytes(data[1:])
        source = open_source(self.pack, kind="pack")
        for index in range(len(source)):
            source.read(index)
        verify_manifest(self.pack / "manifest.json", source)


TARGETS: dict[str, Callable[[Path], Any]] = {
    "recipe": Recipes,
    "weights": Weights,
    "checkpoint": Checkpoints,
    "picture": Pictures,
    "archive": Archives,
    "arrays": Arrays,
    "index": Indices,
}


def files_below(folder: Path) -> set[str]:
    """Every path below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def run_cases(name: str, first: int, count: int, seed: int, base: Path, note: Path) -> dict[str, Any]:
    """Run some cases of one target in this process."""
    work, empty = base / "work", base / "empty"
    for folder in (work, empty):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    os.chdir(empty)
    target = TARGETS[name](work)
    # The undamaged file is read, or the mutants of it would prove nothing.
    target.read(target.good)
    expected = files_below(work)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, held + ROOM))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told: dict[str, Any] = {"accepted": 0, "refused": 0, "findings": [], "slowest": 0.0}
    with note.open("r+b", buffering=0) as place:
        for case in range(first, first + count):
            place.seek(0)
            place.write(struct.pack("<Q", case))
            outcome, seconds = run_case(target, random.Random(f"{seed}/{name}/{case}"))
            told["slowest"] = max(told["slowest"], seconds)
            if outcome in ("accepted", "refused"):
                told[outcome] += 1
            elif len(told["findings"]) < 20:
                told["findings"].append({"target": name, "case": case, "what": outcome})
    for stray in sorted(
        (files_below(work) - expected) | {f"(current folder) {n}" for n in files_below(empty)}
    ):
        told["findings"].append({"target": name, "case": first, "what": f"stray file {stray}"})
    told["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    told["grown_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return told


def run_case(target: Any, rng: random.Random) -> tuple[str, float]:
    """One case: accepted, refused, or what went wrong; and how long it took."""
    data = target.make(rng)
    faulthandler.dump_traceback_later(6 * HANG, exit=True)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    began, outcome = time.perf_counter(), "accepted"
    try:
        target.read(data)
    except FathomsError as error:
        outcome = "refused" if str(error).isprintable() and str(error) else f"no printable line: {error!r}"
    except HangError:
        outcome = f"hang: more than {HANG} s"
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome = f"{type(error).__name__} at {where}: {str(error)[:160]}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    return outcome, time.perf_counter() - began


def _too_long(_number: int, _frame: Any) -> None:
    raise HangError


def in_child(name: str, first: int, count: int, seed: int, base: Path) -> dict[str, Any]:
    """Run some cases in a child; one that dies is a finding, and the case it died at is known."""
    note, answer = base / "note", base / "answer"
    note.write_bytes(bytes(8))
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, _too_long)
            warnings.simplefilter("ignore")
            answer.write_text(json.dumps(run_cases(name, first, count, seed, base, note)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return json.loads(answer.read_text())
    (case,) = struct.unpack("<Q", note.read_bytes())
    finding = {"target": name, "case": case, "what": f"the process ended with {status}"}
    done = {"accepted": 0, "refused": max(0, case - first), "findings": [finding], "slowest": 0.0}
    rest = first + count - case - 1
    told = (
        in_child(name, case + 1, rest, seed, base)
        if rest > 0
        else {"findings": [], "peak_mb": 0, "grown_mb": 0}
    )
    for key in ("accepted", "refused"):
        done[key] += told.get(key, 0)
    done["findings"] += told["findings"]
    return {**told, **done}


def main() -> int:
    """Share the cases among the targets, run them, print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="in all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing new after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--only", choices=tuple(TARGETS), default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args()
    names = [args.only] if args.only else list(TARGETS)
    share = -(-args.cases // len(names))
    base, home = Path(tempfile.mkdtemp(prefix="fuzz-")), Path.cwd()
    began, cases, findings = time.monotonic(), {}, []
    peak, grown, slowest = 0, 0, 0.0
    try:
        for name in names:
            cases[name] = {"cases": 0, "accepted": 0, "refused": 0}
            for first in range(args.first, args.first + share, CHUNK):
                if time.monotonic() - began > args.seconds:
                    break
                count = min(CHUNK, args.first + share - first)
                told = in_child(name, first, count, args.seed, base)
                cases[name]["cases"] += count
                for key in ("accepted", "refused"):
                    cases[name][key] += told[key]
                findings += told["findings"]
                peak, grown = max(peak, told["peak_mb"]), max(grown, told["grown_mb"])
                slowest = max(slowest, told["slowest"])
            print(f"{name}: {cases[name]}, {len(findings)} findings so far", file=sys.stderr, flush=True)
    finally:
        os.chdir(home)
        shutil.rmtree(base, ignore_errors=True)
    kinds = {"hangs": "hang", "stray_files": "stray", "crashes": ""}
    result: dict[str, Any] = {
        "cases": sum(told["cases"] for told in cases.values()),
        "seed": args.seed,
        "targets": cases,
        **{
            kind: sum(start in finding["what"] for finding in findings) if start else 0
            for kind, start in kinds.items()
        },
        "findings": findings[:50],
        "peak_memory_mb": peak,
        "memory_grown_mb": grown,
        "slowest_case_seconds": round(slowest, 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    result["crashes"] = len(findings) - result["hangs"] - result["stray_files"]
    print(json.dumps(result) if args.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
