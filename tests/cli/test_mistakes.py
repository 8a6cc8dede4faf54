"""A corpus of mistakes through every command: exit code 2, one line that says what and what to do, nothing written."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

import fathoms
from fathoms.cli.main import COMMANDS, main, module_of

# Refused before torch is imported. Each is also tried in a process of its own.
QUICK = [
    "trian",
    "data chekc photos",
    "train nosuch",
    "train pohtos",
    "train --learning-rate 1",
    "train --seed -1",
    "train --seed 99999999999999999999",
    "train --device tpu",
    "train --workers -1",
    "train --epochs 0",
    "train --lr nan",
    "train --recipe nosuch",
    "train --recipe nosuch.toml",
    "train --recipe broken.toml",
    "train --recipe huge.toml",
    "train --recipe unknown.toml",
    "train --model nosuch",
    "train --experiment ../x",
    "train --resume",
    "train --initial-checkpoint runs/nosuch",
    "train --initial-head new",
    "train --teacher nosuch --distillation-type hard",
    "train --teacher vit_digits --distillation-type hard",
    "train --output notes.txt",
    "train --depth 0",
    "train --dim 7",
    "validate",
    "validate --checkpoint runs/typo",
    "validate --checkpoint weihgts.safetensors",
    "validate --checkpoint vit_digits",
    "validate --checkpoint timm/vit_tiny_patch16_224",
    "validate --checkpoint hf-hub:nobody",
    "validate nosuch --checkpoint weights.safetensors",
    "validate --checkpoint weights.safetensors --batch-size 0",
    "validate --checkpoint weights.safetensors --device gpu",
    "validate --checkpoint weights.safetensors --model nosuch",
    "validate --checkpoint weights.safetensors --robustness nosuch",
    "predict --checkpoint weights.safetensors nosuch.png",
    "predict photos --checkpoint nosuch",
    "predict photos --checkpoint weights.safetensors --top 0",
    "predict photos --checkpoint weights.safetensors --attention notes.txt",
    "predict photos --checkpoint weights.safetensors --attention notes.txt/maps",
    "predict photos --checkpoint weights.safetensors --classes nosuch.txt",
    "export nosuch",
    "export weights.safetensors --max-drop 3",
    "export weights.safetensors --int8 nosuch",
    "convert nosuch.pth out.safetensors",
    "compare nosuch",
    "compare --axis seed=1,2",
    "compare --axis learning_rate=1,2",
    "compare --axis norm",
    "compare --axis norm=layernorm,dty",
    "compare --tune lr=0.1,foo --axis norm=layernorm,dyt",
    "compare --seeds 0",
    "compare --preset nosuch",
    "compare --plan nosuch.toml",
    "compare --plan broken.toml",
    "compare --budget soon",
    "compare --shard 3",
    "compare --seed 3",
    "compare --norm dyt",
    "compare --axis norm=layernorm,rmsnorm --norm dyt",
    "compare --preset residual --depth 6",
    "report",
    "report nosuch",
    "report photos",
    "report damaged",
    "watch nosuch",
    "watch damaged --port 99999",
    "recipes nosuch",
    "recipes broken.toml",
    "models nosuch",
    "models 'x*'",
    "bench nosuch",
    "bench vit_digits --batch-size 0",
    "bench vit_digits --device npu",
]
# These need torch, or data that is opened with it.
SLOWER = [
    "train notes.txt",
    "train empty",
    "train broken.npz",
    "train --aa nosuch",
    "train --device mps",
    "train --device cuda:99",
    "train --freeze nosuch*",
    "train --progressive-size 0:3",
    "train --swap-norms nosuch",
    "train --log nosuch",
    "train --initial-checkpoint torn.safetensors",
    "train --initial-checkpoint weights.safetensors --depth 3",
    "train --initial-checkpoint notes.txt",
    "train --torchcompile nosuch",
    "train --residual completep --base-depth 0",
    "train --residual completep --base-depth 1000",
    "train --residual none --base-depth 6",
    "train --residual completep --base-dim 8 --opt lamb",
    "train --residual orthogonal --residual-init 0.1",
    "train --residual prores --residual-warmup 0",
    "train --readout class_attention --attn-gate head",
    "train --placement-by-depth 0-1:post,1-2:pre",
    "train --placement-by-depth 0-99:post",
    "train --placement-by-depth 0-1:pots",
    "train --norm-by-depth 0-1:dyt,1:rmsnorm",
    "train --attn-placement keel --norm none",
    "train --residual deepnorm --attn-placement keel",
    "train --class-token-block 99",
    "train --readout mean --class-token-block 1",
    "train --stem-layers 2",
    "train --stem conv --stem-norm dual",
    "validate --checkpoint torn.safetensors --model vit_digits",
    "validate --checkpoint weights.safetensors",
    "validate photos --checkpoint weights.safetensors --model vit_digits",
    "validate photos --checkpoint weights.safetensors",
    "validate photos --checkpoint weights.safetensors --split nosuch",
    "validate photos --checkpoint weights.safetensors --confusion nosuch/c.csv",
    "validate photos --checkpoint weights.safetensors --results-file c.txt",
    "validate photos --checkpoint weights.safetensors --real-labels notes.txt",
    "validate photos --checkpoint empty",
    "validate photos --checkpoint damaged",
    "predict empty --checkpoint weights.safetensors",
    "predict photos --checkpoint weights.safetensors --std 0 0 0",
    "predict photos --checkpoint weights.safetensors --device mps",
    "predict photos --checkpoint notes.txt",
    "export weights.safetensors --format onx",
    "export weights.safetensors --opset 1",
    "export weights.safetensors --output nosuch/m.onnx",
    "export torn.safetensors --model vit_digits",
    "export empty",
    "convert notes.txt out.safetensors",
    "convert weights.safetensors out.safetensors",
    "data info nosuch",
    "data info notes.txt",
    "data check nosuch",
    "data check broken.npz",
    "data pack nosuch out",
    "parts nosuch",
    "bench vit_digits --device mps",
    "probe --batch-size 0",
    "probe --depth -3",
    "probe --figures notes.txt",
    "probe --figures drawn",
    "probe --figures drawn --depths 2",
    "probe --figures drawn --coordinates depth=2,4",
    "data check photos --manifest notes.txt",
    "data check others",
    "data pack photos notes.txt",
    "data pack photos others",
    "data pack photos photos/train/packed",
    "data pack photos packed --workers -3",
    "data check photos --workers -3",
    "data check photos --near -2",
    "data check photos --manifest nosuch/m.json",
]


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


@pytest.mark.parametrize("line", [*QUICK, *SLOWER])
def test_a_mistake_is_one_line_and_writes_nothing(line, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    before = listing(place)
    assert main(shlex.split(line)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    is_one_line(line, err)
    assert listing(place) == before


SAID = {
    "train --model hf-hub:timm/vit_tiny": "names weights, not an architecture; give a name from `fathoms models`, and",
    "train --model weights.safetensors": "the weights as --initial-checkpoint weights.safetensors",
    "train --model timm/vit_tinny": "no timm model is called 'vit_tinny'; did you mean 'vit_tiny_patch16_224'?",
    "probe timm/resnet5": "did you mean 'resnet50'?",
    "train --norm None": "--norm: no value is called 'None'; did you mean 'none'?",
    "train --residual rezro": "did you mean 'rezero'?",
    "train --placement-by-depth 0-2": "'0-2' is not a range with a name; write for example '0-2:post'",
    "train --placement-by-depth 0-99:post": "leaves the blocks 0-11 of this model; write the first block, then",
    "train --initial-checkpoint arrays.npz": "arrays (.npz) are not read as weights; save them as .safetensors",
    "validate --checkpoint arrays.npz": "arrays (.npz) are not read as weights",
    "validate --checkpoint notes.txt": "only .safetensors files are opened",
    "validate --checkpoint many": "many: is a folder of runs; give one of them, such as many/one",
    "validate --checkpoint nowhere": "nowhere: is a link that leads nowhere; fix it",
    "predict photos --checkpoint compared": "is a folder of runs; give one of them, such as compared/cells/one",
    "validate photos --checkpoint weights.safetensors --model vit_tiny_patch16_224": (
        "depth 1 against 12, dim 8 against 192, patch_size 2 against 16; give the --model of these weights, or leave "
        "--model out"
    ),
    "predict photos --checkpoint weights.safetensors --attention notes.txt": (
        "--attention notes.txt: notes.txt is a file, not a folder; give another folder"
    ),
    "export weights.safetensors --format onnx --output m.txt": "m.txt: an ONNX file ends in .onnx; change the name",
}


@pytest.mark.parametrize("line", SAID)
def test_a_mistake_is_answered_with_what_to_do(line, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    assert main(shlex.split(line)) == 2
    printed = capfd.readouterr().err
    is_one_line(line, printed)
    assert SAID[line] in printed


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


ALONE = "import sys\nfrom fathoms.cli.main import main\ncode = main(sys.argv[1:])\nprint(code, 'torch' in sys.modules)"


def test_thirty_mistakes_as_processes_are_refused_before_torch_is_imported(place):
    def refused(line):
        words = [sys.executable, "-c", ALONE, *shlex.split(line)]
        environment = {**os.environ, "NO_COLOR": "1"}
        result = subprocess.run(
            words, cwd=place, env=environment, capture_output=True, text=True, timeout=120
        )
        return line, result.stdout, result.stderr

    before = listing(place)
    with ThreadPoolExecutor(4) as pool:
        for line, out, err in pool.map(refused, QUICK[:: len(QUICK) // 30][:30]):
            assert out == "2 False\n", line
            is_one_line(line, err)
    assert listing(place) == before


def test_none_of_the_quick_ones_imports_torch(place):
    code = (
        "import sys, shlex\nfrom fathoms.cli.main import main\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    assert main(shlex.split(line)) == 2, line\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=place,
        input="\n".join(QUICK),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("\n") == len(QUICK)
