"""`fathoms convert` and the pickles that weights-only loading lets through: bombs, loops, views, doubles."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import pytest
import torch

from fathoms import FathomsError
from fathoms.models.pickled_weights import convert

pytestmark = pytest.mark.plain


def deep(levels):
    value: dict = {"x": torch.ones(1)}
    for _ in range(levels):
        value = {"a": value}
    return value


def looped():
    value: dict = {"w": torch.ones(1)}
    value["self"] = value
    return value


CONTENTS = {
    "view": (
        {"w": torch.ones(1).expand(10**5, 10**5)},
        "its tensors take 40.0 GB, more than --max-gb allows",
    ),
    "loop": (looped(), "it contains itself"),
    "deep": (deep(1500), "nested too deeply"),
    "double": ({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, "is the name of two things"),
    "metadata": ({"__metadata__": torch.ones(1)}, "is the name of two things"),
    "sparse": ({"w": torch.eye(3).to_sparse()}, "is not a plain tensor"),
    "meta": ({"w": torch.empty(10**6, 10**6, device="meta")}, ""),
    "nothing": ({}, "it holds no tensors"),
    "numbers": ({"epoch": 10**5000}, ""),
}


def bomb(path):
    """Half a gigabyte of zeros in half a megabyte, which the archive's own directory calls 10 bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/version", "3")
        with archive.open("archive/data/0", "w", force_zip64=True) as member:
            for _ in range(512):
                member.write(bytes(1 << 20))
    data = path.read_bytes()
    at = data.rindex(b"PK\x01\x02")
    path.write_bytes(data[: at + 24] + struct.pack("<I", 10) + data[at + 28 :])


CHILD = """
import json, sys
from fathoms.models import unpickle
for name in json.loads(sys.argv[1]):
    print(json.dumps(unpickle.main(f"{name}.pth", f"{name}.safetensors", "", str(6 << 30), "60", str(10**8))))
"""


def test_what_is_no_set_of_plain_tensors_is_refused_by_the_reader_under_its_limits(place):
    """All in one process with the limits of `fathoms convert`: each start of torch takes seconds."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    for name, (content, _) in CONTENTS.items():
        torch.save(content, place / f"{name}.pth")
    sys.setrecursionlimit(limit)
    bomb(place / "bomb.pth")
    (place / "cut.pth").write_bytes((place / "view.pth").read_bytes()[:-30])
    (place / "pipe.pth").write_bytes(b"\x80\x02" + b"(" * 10_000)
    (place / "long.pth").write_bytes(b"\x80\x04" + b"\x8e" + struct.pack("<Q", 1 << 40))
    names = [*CONTENTS, "bomb", "cut", "pipe", "long"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(names)],
        capture_output=True,
        text=True,
        cwd=place,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    results = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=False))
    assert list(results) == names, done.stderr[-1500:]
    for name, result in results.items():
        assert "error" in result, (name, result)
        assert CONTENTS.get(name, ("", ""))[1] in result["error"], (name, result)
    assert not list(place.glob("*.safetensors"))


def test_names_out_of_a_pickle_are_printed_as_text(place, capsys):
    from fathoms.cli.main import main

    torch.save({"w\x1b[31m": torch.ones(2), "note\n": "\x1b]0;owned\x07"}, place / "odd.pth")
    assert main(["convert", "odd.pth", "odd.safetensors"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert len(out.splitlines()) == 5
    assert "note\\n" in out


def test_a_loop_is_refused_in_one_line_and_leaves_nothing(place):
    torch.save(looped(), place / "loop.pth")
    with pytest.raises(FathomsError, match="it contains itself") as caught:
        convert(place / "loop.pth", place / "loop.safetensors")
    assert str(caught.value).isprintable()
    assert [path.name for path in place.iterdir()] == ["loop.pth"]
