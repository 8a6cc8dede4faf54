"""Links at every path that a command writes: nothing that they point to is deleted, emptied or written."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fathoms import create_model, save_weights
from fathoms.cli.main import main

RUN = [
    *("--epochs", "1", "--depth", "1", "--dim", "16", "--heads", "2", "--batch-size", "512"),
    *("--warmup-epochs", "0", "--device", "cpu", "--seed", "1", "--probe-interval", "1"),
]
WEIGHTS = ["--checkpoint", "digits.safetensors", "--model", "vit_digits"]
RESULTS = ["--results-file", "out/r.json", "--confusion", "out/c.csv", "--per-class", "out/p.csv"]
COMMANDS = {
    "train": ["train", *RUN, "--output", "out", "--experiment", "e"],
    "train twice": ["train", *RUN, "--epochs", "2", "--output", "out", "--experiment", "e"],
    "report": ["report", "run", "--overwrite"],
    "report of two": ["report", "run", "other", "--output", "out/page.html", "--overwrite"],
    "probe": ["probe", "vit_digits", "--depth", "1", "--figures", "out/pictures", "--overwrite"],
    "depths": ["probe", "vit_digits", "--depths", "1,2", "--figures", "out/pictures", "--overwrite"],
    "check": ["data", "check", "photos"],
    "pack": ["data", "pack", "photos", "out/packed"],
    "predict": ["predict", "photos/train/a", *WEIGHTS, "--attention", "out/maps", "--overwrite"],
    "validate": ["validate", "photos", *WEIGHTS, "--split", "val", *RESULTS, "--overwrite"],
    "convert": ["convert", "digits.pth", "out/made.safetensors", "--overwrite"],
    "export": [
        *("export", "digits.safetensors", "--model", "vit_digits", "--format", "safetensors"),
        *("--output", "out/made.safetensors", "--overwrite"),
    ],
    "compare": [
        *("compare", *RUN[:8], "--batch-size", "512", "--warmup-epochs", "0", "--device", "cpu"),
        *("--axis", "norm=layernorm,rmsnorm", "--seeds", "1", "--output", "out", "--experiment", "e"),
        *("--smallest-difference", "5", "--keep", "none", "--jobs", "1"),
    ],
}
# Names that are drawn anew each time cannot be planted.
RANDOM = re.compile(r"(^|/)\.?(\.[0-9a-f]{8}\.|trash-|[^/]*tmp[a-z0-9_]{8})")
_written: list[str] | None = None


def _note(event: str, words: tuple) -> None:
    if _written is None:
        return
    if event == "open" and isinstance(words[0], str) and (words[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        _written.append(words[0])
    elif event in ("os.mkdir", "os.remove", "os.rename", "os.truncate", "os.rmdir", "shutil.rmtree"):
        _written.extend(str(word) for word in words[:2] if isinstance(word, str | Path))


sys.addaudithook(_note)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What the commands read: photos, weights, two runs; and a folder that the user made."""
    place = tmp_path_factory.mktemp("prepared")
    pixels = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in "abcdefghij"[: 2 if split == "train" else 10]:
            (place / "photos" / split / name).mkdir(parents=True)
    for split in ("train", "val"):
        for name in "abcdefghij":
            (place / "photos" / split / name).mkdir(exist_ok=True)
            image = Image.fromarray(pixels.integers(0, 255, (12, 12, 3), np.uint8))
            image.save(place / "photos" / split / name / "1.png")
    (place / "out").mkdir()
    model = create_model("vit_digits", num_classes=10)
    save_weights(model, place / "digits.safetensors")
    torch.save({"model": model.state_dict()}, place / "digits.pth")
    for name in ("run", "other"):
        words = ["train", *RUN, "--output", str(place), "--experiment", name]
        assert main(words) == 0
    return place


def run(place: Path, words: list[str]) -> tuple[int, set[str]]:
    """The exit code of the command in that folder, and what it wrote there, as far as names can be foreseen."""
    global _written
    before, here = {str(path) for path in place.rglob("*")}, Path.cwd()
    os.chdir(place)
    _written = []
    try:
        code = main(words)
    finally:
        seen, _written = _written, None
        os.chdir(here)
    paths = {os.path.normpath(place / path) for path in seen}
    paths |= {str(path) for path in place.rglob("*")} - before
    below = {os.path.relpath(path, place) for path in paths if path.startswith(f"{place}/")}
    return code, {path for path in below if not RANDOM.search(path)}


def state(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below one, with what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def plant(place: Path, outside: Path, path: str, folder: bool) -> None:
    """A link at a path of `place` to what stood there, or to a file or folder of the user's."""
    target, goal = place / path, outside / path.replace("/", "!")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.move(target, goal)
    elif folder:
        goal.mkdir()
    else:
        goal.write_text("mine")
    if goal.is_dir():
        (goal / "mine").write_text("mine")
    target.symlink_to(goal)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_touched_through_a_link_at_any_path_that_a_command_writes(
    name, prepared, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words, first = COMMANDS[name], tmp_path / "first"
    shutil.copytree(prepared, first)
    _, written = run(first, words)
    if name.startswith("train"):
        # A run that was cut: the second command resumes, and drops the lines after its checkpoint.
        with (first / "out/e/metrics.jsonl").open("a") as file:
            file.write('{"version": 2, "epoch": 9}\n')
        (first / "out/e/summary.json").unlink()
    # A folder that the user names may be a link to where it is wanted; nothing below it may be one.
    named = {str(above) for word in words for above in (Path(word), *Path(word).parents)}
    above = {str(parent) for path in written for parent in Path(path).parents}
    folders = {path for path in written if path in above or (first / path).is_dir()}
    files, folders = sorted(written - folders), sorted(folders - named)
    assert files, "nothing was written"
    if name == "compare":
        # The folders of its runs hold the same names: one of each.
        files, folders = ([*{Path(path).name: path for path in paths}.values()] for paths in (files, folders))

    def holds(start: Path, paths: list[str]) -> int:
        place, outside = tmp_path / "place", tmp_path / "outside"
        shutil.copytree(start, place, symlinks=True)
        outside.mkdir()
        for path in paths:
            plant(place, outside, path, path in folders)
        before = state(outside)
        code, _ = run(place, words)
        assert state(outside) == before, f"{' '.join(words)} wrote through {paths}"
        shutil.rmtree(place)
        shutil.rmtree(outside)
        return code

    # Before the first command, and in what it left. A comparison of which nothing is there yet takes too long.
    for start in [first] if name == "compare" else [prepared, first]:
        for path in folders:
            holds(start, [path])
        # All at once, and each alone where the command refuses one and never comes to the others.
        if holds(start, files) != 0:
            for path in files:
                holds(start, [path])
