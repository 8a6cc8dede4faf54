"""Mistakes of every command: one line, exit code 2, before any long work, and nothing written.

mistakes.txt has the commands and the line that each gets; after a line was reworded, or a command added without one,
`pytest tests/cli/test_mistakes.py --rewrite` writes them anew: read the difference.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import typing
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fathoms
from fathoms.cli.main import COMMANDS, main, module_of

KEPT = Path(__file__).with_name("mistakes.txt")
QUICK, SLOW = (
    dict(re.findall(r"^\$ (.*)\n(?:([^#$\n].*)\n)?", part, re.MULTILINE))
    for part in KEPT.read_text().split("# needs torch, or data that is opened with it\n")
)
GPU = "cuda|npu|mps"
"""Words of mistakes that are others on a machine with a GPU."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what people point the commands at."""
    place = tmp_path_factory.mktemp("mistakes")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = place / "photos" / split / label
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    for name in ("empty", "damaged"):
        (place / name).mkdir()
    (place / "damaged" / "config.toml").write_text("[model\n")
    # Files that a command would replace.
    shutil.copytree(place / "photos", place / "others")
    for name in ("others/fathoms-manifest.json", "others/index.json", "others/train-000000.tar"):
        (place / name).write_text("{}")
    (place / "drawn").mkdir()
    for name in ("probe.html", "sweep.svg", "coordinates.json"):
        (place / "drawn" / name).write_text("mine")
    (place / "notes.txt").write_text("notes\n")
    for name in ("many/one", "many/two", "compared/cells/one"):
        (place / name).mkdir(parents=True)
        (place / name / "config.toml").write_text("")
    (place / "nowhere").symlink_to("gone")
    np.savez(place / "arrays.npz", weight=np.zeros(3))
    (place / "broken.npz").write_bytes(b"PK\x03\x04 not an archive")
    (place / "broken.toml").write_text("lr = \n")
    (place / "huge.toml").write_text(f"epochs = 0x{'f' * 50_000}\n")
    (place / "unknown.toml").write_text("learning_rate = 1.0\n")
    config = fathoms.ViTConfig(image_size=8, patch_size=2, dim=8, heads=2, depth=1, num_classes=3)
    fathoms.save_weights(fathoms.ViT(config), place / "weights.safetensors")
    (place / "weights.safetensors.json").write_text(
        json.dumps({"config": config.to_dict(), "classes": ["bee", "ant", "wasp"]})
    )
    (place / "torn.safetensors").write_bytes((place / "weights.safetensors").read_bytes()[:300])
    return place


def listing(place):
    return {str(path): path.stat().st_mtime_ns for path in sorted(place.rglob("*")) if path.is_file()}


def is_one_line(line, printed):
    name = next((name for name in COMMANDS if line.startswith(f"{name} ") or line == name), "")
    assert printed.endswith("\n"), printed
    assert printed.count("\n") == 1, printed
    assert printed.startswith(f"fathoms {name}: " if name else "fathoms: "), printed
    assert "Traceback" not in printed
    assert len(printed) < 500, printed


def check(request, kept, found):
    """Each line is what is kept; with --rewrite it is kept from now on."""
    for line, said in found.items():
        is_one_line(line, said)
    found = {line: said.rstrip("\n") for line, said in found.items()}
    if torch.cuda.is_available():
        found = {line: said for line, said in found.items() if not re.search(GPU, line)}
    if request.config.getoption("--rewrite"):
        text = KEPT.read_text()
        for line, said in found.items():
            old = f"$ {line}\n{kept[line]}\n" if kept[line] else f"$ {line}\n"
            assert old in text
            text = text.replace(old, f"$ {line}\n{said}\n", 1)
        KEPT.write_text(text)
        return
    assert found == {line: kept[line] for line in found}


EACH = """
import contextlib, io, json, shlex, sys
from fathoms.cli.main import main
for line in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    print(json.dumps([line, code, "torch" in sys.modules, out.getvalue(), err.getvalue()]))
"""


def test_the_quick_ones_are_refused_before_torch_is_imported(place, request):
    before = listing(place)
    words = [sys.executable, "-c", EACH]
    done = subprocess.run(
        words, cwd=place, input="\n".join(QUICK), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(row) for row in done.stdout.splitlines()]
    assert [row[:4] for row in found] == [[line, 2, False, ""] for line in QUICK]
    check(request, QUICK, {line: err for line, *_, err in found})
    assert listing(place) == before


BY_COMMAND = {name: list(lines) for name, lines in groupby(sorted(SLOW), lambda line: line.split()[0])}


@pytest.mark.plain
@pytest.mark.parametrize("command", BY_COMMAND)
def test_the_others_are_refused_too(command, place, monkeypatch, capfd, request):
    monkeypatch.chdir(place)
    before, found = listing(place), {}
    for line in BY_COMMAND[command]:
        assert main(shlex.split(line)) == 2, line
        out, found[line] = capfd.readouterr()
        assert out == "", line
    check(request, SLOW, found)
    assert listing(place) == before


def test_weights_without_a_card_give_the_number_of_classes(tmp_path):
    model = fathoms.create_model("vit_digits", depth=1, num_classes=7)
    fathoms.save_weights(model, tmp_path / "w.safetensors")
    assert fathoms.load_run(tmp_path / "w.safetensors", "vit_digits", depth=1).num_classes == 7


def wrong_values(command):
    """One wrong value for each type of flag that a command has."""
    args = module_of(command).Args
    seen = {}
    for name, hint in typing.get_type_hints(args).items():
        kinds = {hint, *typing.get_args(hint)}
        kind = next((k for k in kinds if k in (int, float) or typing.get_origin(k) is typing.Literal), None)
        if kind is not None and tuple not in {typing.get_origin(k) for k in kinds}:
            seen.setdefault(typing.get_origin(kind) or kind, name)
    return [f"--{name.replace('_', '-')}" for name in seen.values()]


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_flags_missing_and_wrong_values_are_one_line_in_every_command(
    command, capfd, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flags = wrong_values(command)
    lines = [f"{command} --nosuch", f"{command} -q", *(f"{command} {flag} nosuch" for flag in flags)]
    lines += [f"{command} {flag}" for flag in flags]
    for line in lines:
        assert main(line.split()) == 2, line
        out, err = capfd.readouterr()
        assert out == ""
        is_one_line(line, err)
    assert not list(tmp_path.iterdir())
