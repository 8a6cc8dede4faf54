"""Targets of benchmarks/fuzz.py: for each kind of file a good one, its mutants, and its reader."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import fathoms
from fathoms import ViT, ViTConfig
from fathoms.data import choose_decoder, open_source
from fathoms.data.readiness import verify_manifest
from fathoms.report.comparison_page import render_comparison
from fathoms.report.figures import figures
from fathoms.report.page import read
from fathoms.report.records import RunRecord
from fathoms.report.run_page import render_run
from fathoms.training import checkpoint_files as checkpoints
from fathoms.training.checkpoint_load import read as read_checkpoint
from fathoms.training.guard import GUARD_COUNTS
from fathoms.training.recipe import Recipe, read_recipe, recipe_names, recipe_options
from fathoms.training.run_folder import to_toml
from fathoms.training.speed import Speed
from fuzz_mutate import as_json, changed, damaged

MAX_PIXELS = 1 << 22


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
        """A recipe with a changed value, or with damaged text."""
        if rng.random() < 0.5:
            with contextlib.suppress(Exception):
                return to_toml(changed(rng.choice(self.tables), rng)).encode("utf-8", "surrogatepass")
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
        """A changed header, a damaged header, or a damaged file."""
        file = rng.choice(self.files)
        (length,) = struct.unpack("<Q", file[:8])
        header, body = file[8 : 8 + length], file[8 + length :]
        kind = rng.random()
        if kind < 0.45:
            header = as_json(changed(json.loads(header), rng))
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
    """Checkpoint folders of a run: manifest and state; half of them with corrected hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        state: dict[str, Any] = {
            "epoch": 1,
            "batch": 2,
            "updates": 3,
            "best": None,
            "last": {"epoch": 0, "top1": 1.0},
        }
        state |= {"seconds": 1.5, "sums": [[1.0, 2.0, 3.0, 4.0]], "lines": {"metrics.jsonl": 10}}
        state |= {
            "identity": {"recipe": {"lr": 0.1}},
            "data": "ab",
            "scaler": {},
            "classes": ["a"],
            "world": 1,
            "batches_per_epoch": 5,
            "speed": {**vars(Speed()), "device": "cpu"},
            "peak_memory": None,
            "bad_images": {"train/1.jpg": "truncated"},
        }
        state["guard"] = dict.fromkeys(GUARD_COUNTS, 0)
        state["guard"] |= {"passed_over": [], "losses": [1.0]}
        state["optimizer"] = {"optimizer": "AdamW", "parameters": {"w": ["step"]}, "numbers": {}}
        self.tensors = {"model": {"w": torch.ones(3)}, "optimizer": {"exp_avg/w": torch.ones(3)}}
        checkpoints.write(self.folder, checkpoints.Checkpoint(self.tensors, state))
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.good = joined(self.files)

    def make(self, rng: random.Random) -> bytes:
        """The files as one JSON, one of them changed or damaged."""
        files = dict(self.files)
        name = rng.choice(("state.json", "state.json", "manifest.json", "model.safetensors"))
        if name.endswith(".json") and rng.random() < 0.6:
            files[name] = as_json(changed(json.loads(files[name]), rng))
        else:
            files[name] = damaged(files[name], rng, list(files.values()))
        if name != "manifest.json" and rng.random() < 0.8:
            manifest = json.loads(files["manifest.json"])
            manifest[name] = hashlib.sha256(files[name]).hexdigest()
            files["manifest.json"] = as_json(manifest)
        return joined(files)

    def read(self, data: bytes) -> None:
        """Read it as a resumed run does."""
        for name, content in split(data).items():
            (self.folder / name).write_bytes(content)
        read_checkpoint(self.folder)


class Images:
    """JPEG, PNG, GIF, WebP and BMP, plain and with metadata, by every decoder."""

    def __init__(self, _folder: Path) -> None:
        rng = np.random.default_rng(0)
        image = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)).resize((60, 44))
        exif = Image.Exif()
        exif[0x0112] = 6
        variants: list[tuple[str, Image.Image, dict[str, Any]]] = [
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
        for kind, variant, options in variants:
            buffer = io.BytesIO()
            variant.save(buffer, kind, **options)
            self.files.append(buffer.getvalue())
        self.good = self.files[0]
        self.decoders = [choose_decoder(name, max_pixels=MAX_PIXELS) for name in ("auto", "simplejpeg")]

    def make(self, rng: random.Random) -> bytes:
        """A damaged image; a PNG's checksums are corrected half of the time."""
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
    """A PNG with the right checksums, so that a reader parses its chunks."""
    fixed, place = data[:8], 8
    while place + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        piece = data[place + 4 : place + 8 + length]
        fixed += data[place : place + 4] + piece + struct.pack(">I", zlib.crc32(piece))
        place += 12 + length
    return fixed + data[place:]


class Archives:
    """Tar files: an image folder, WebDataset samples, long names in GNU's and in POSIX' format."""

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
        """A damaged archive; most headers get corrected checksums."""
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
    """JSON files of data sets: a pack's index and table, and the manifest of a check."""

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
        """One of the files, changed or damaged; its number comes first."""
        number = rng.randrange(3)
        good = self.tables[self.names[number]]
        text = (
            as_json(changed(good, rng))
            if rng.random() < 0.7
            else damaged(as_json(good), rng, [as_json(good)])
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


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""


class Reports:
    """Files of a run folder other than checkpoints, and the report made from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        row = {"epoch": 0, "step": 4, "split": "train", "loss": 2.3, "top1": 10.0, "lr": 0.001}
        site = {
            "block": "blocks.0",
            "branch": "attn",
            "stream": 1.0,
            "ratio": 0.1,
            "gradient": 0.2,
            "weights": 3,
        }
        self.tables: dict[str, Any] = {
            "config.toml": {
                "classes": ["a", "b"],
                "model": {"name": "vit", "depth": 2},
                "recipe": {"lr": 0.1},
            },
            "summary.json": {"status": "done", "best": {"top1": 9.0, "epoch": 0}, "seconds": 3.5, "epoch": 1},
            "environment.json": {
                "python": "3.11",
                "versions": {"torch": "2.11"},
                "memory": 8e9,
                "starts": [{"time": "2026-01-02T03:04:05+00:00", "command": ["fathoms", "train"]}],
            },
            "updates.jsonl": [{"version": 2, "update": 1, "loss": [2.3, 2.1], "gradient_norm": [1.0, 0.9]}],
            "guard.jsonl": [
                {"version": 2, "kind": "spike", "act": "log", "epoch": 1, "update": 2, "loss": 9.0}
            ],
            "evaluation.json": {"split": "test", "confusion": [[0, 0, 3], [0, 1, 2], [1, 1, 4]]},
            "examples.json": {"examples": [{"name": "a", "label": 1, "top": [[0, 0.7]], "png": PIXEL}]},
            "metrics.jsonl": [row, {**row, "split": "val"}, {**row, "epoch": 1, "loss": 1.9}],
            "probe.jsonl": [{"step": 2, "sites": [site, site]}, {"step": 4, "sites": [site, site]}],
        }
        self.files = {name: self._text(name, table) for name, table in self.tables.items()}
        self.good = joined(self.files)

    def _text(self, name: str, table: Any) -> bytes:
        if name.endswith(".toml"):
            return to_toml(table).encode("utf-8", "surrogatepass")
        return b"\n".join([*map(as_json, table), b""]) if isinstance(table, list) else as_json(table)

    def make(self, rng: random.Random) -> bytes:
        """One of the files, changed or damaged."""
        files, name = dict(self.files), rng.choice(list(self.files))
        files[name] = damaged(files[name], rng, list(files.values()))
        if rng.random() < 0.7:
            with contextlib.suppress(Exception):
                files[name] = self._text(name, changed(self.tables[name], rng))
        return joined(files)

    def read(self, data: bytes) -> None:
        """Make the report."""
        for name, content in split(data).items():
            (self.folder / name).write_bytes(content)
        record = read([self.folder])
        if isinstance(record, RunRecord):
            render_run(record)
        else:
            render_comparison(record, figures(record))


TARGETS: dict[str, Callable[[Path], Any]] = {
    "recipe": Recipes,
    "weights": Weights,
    "checkpoint": Checkpoints,
    # The name is part of the seed of its cases.
    "picture": Images,
    "archive": Archives,
    "arrays": Arrays,
    "index": Indices,
    "report": Reports,
}
