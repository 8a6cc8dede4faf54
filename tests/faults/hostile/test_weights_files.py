"""Untrusted checkpoints: nothing in them is run, and their headers are not trusted."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fathoms
from fathoms import FathomsError, ViT, ViTConfig

pytestmark = pytest.mark.plain

TINY = {
    "image_size": 8,
    "patch_size": 2,
    "in_channels": 1,
    "num_classes": 10,
    "dim": 8,
    "heads": 2,
    "depth": 1,
}


def commands(file: Path) -> list[list[str]]:
    """Every way a weights file is given to a command."""
    return [
        ["validate", "--checkpoint", str(file), "--model", "vit_digits", "--device", "cpu"],
        ["export", str(file), "--model", "vit_digits"],
        ["predict", "image.png", "--checkpoint", str(file), "--model", "vit_digits"],
        ["train", "--initial-checkpoint", str(file), "--device", "cpu", "--epochs", "1"],
        ["train", "--teacher", f"vit_digits={file}", "--distillation-type", "hard", "--device", "cpu"],
    ]


@pytest.mark.parametrize("name", ["evil.pth", "evil.tar", "evil.safetensors"])
def test_a_pickle_given_to_any_command_is_refused_and_runs_nothing(name, evil, place, refused):
    from PIL import Image

    Image.new("L", (8, 8)).save(place / "image.png")
    (place / name).write_bytes(evil)
    for words in commands(place / name):
        printed = refused(
            *words, says="run code" if "safetensors" not in name else "not a readable safetensors"
        )
        assert name in printed


def test_a_distributed_checkpoint_folder_is_not_unpickled(evil, place, refused):
    folder = place / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(evil)
    (folder / "__0_0.distcp").write_bytes(evil)
    refused("validate", "--checkpoint", folder, "--model", "vit_digits", says="holds no weights")
    refused("convert", folder, place / "out.safetensors", says="no such file")


def test_pickles_beside_a_run_are_left_alone(evil, place, refused):
    """A folder that looks like a run, with a pickle under every name other tools would open."""
    (place / "checkpoints" / "last").mkdir(parents=True)
    for name in ("model.pt", "pytorch_model.bin", "optimizer.pt", "training_args.bin", "config.toml.pkl"):
        (place / "checkpoints" / "last" / name).write_bytes(evil)
    refused("validate", "--checkpoint", place, "--model", "vit_digits", says="holds no weights")


def file_with(header: bytes, data: bytes = bytes(64), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(**changes) -> dict:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def header_of(**entries) -> bytes:
    return json.dumps(entries).encode()


LIES = {
    "a header of 2^63 bytes": file_with(b"{}", length=2**63),
    "a header just too long": file_with(b"{}", length=67),
    "17 MB of header": file_with(b'{"a": "' + b"x" * (17 << 20) + b'"}'),
    "no UTF-8": file_with(b'{"\xff\xfe": 1}'),
    "nested too deep": file_with(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of 10,000 digits": file_with(b'{"a": {"shape": [' + b"9" * 10_000 + b"]}}"),
    "NaN": file_with(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}'),
    "the same name twice": file_with(
        b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a": {"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'
    ),
    "offsets that overlap": file_with(header_of(a=entry(), b=entry(data_offsets=[4, 12]))),
    "a hole": file_with(header_of(a=entry(), b=entry(data_offsets=[16, 24]))),
    "offsets backwards": file_with(header_of(a=entry(data_offsets=[8, 0]))),
    "negative offsets": file_with(header_of(a=entry(data_offsets=[-8, 0]))),
    "a negative shape": file_with(header_of(a=entry(shape=[-2]))),
    "a shape that overflows": file_with(header_of(a=entry(shape=[2**40, 2**40]))),
    "a shape that overflows to 2": file_with(header_of(a=entry(shape=[2**63 + 1, 2]))),
    "another type than the bytes": file_with(header_of(a=entry(dtype="F64"))),
    "an unknown type": file_with(header_of(a=entry(dtype="os.system"))),
    "a text for a shape": file_with(header_of(a=entry(shape="2"))),
    "true for a side": file_with(header_of(a=entry(shape=[True, 2]))),
    "metadata that is not a table": file_with(header_of(__metadata__=[1], a=entry())),
    "data missing": file_with(header_of(a=entry()), b""),
    "data left over": file_with(header_of(a=entry()), bytes(9)),
    "a number for an entry": file_with(header_of(a=3)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused_in_one_line(lie, place):
    (place / "model.safetensors").write_bytes(LIES[lie])
    model = ViT(ViTConfig(**TINY))
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(FathomsError, match="not a readable safetensors file") as caught:
        fathoms.load_weights(model, place / "model.safetensors")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def own_weights() -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in ViT(ViTConfig(**TINY)).named_parameters()}


def timm_weights() -> dict[str, torch.Tensor]:
    from fathoms.models.weight_names import to_timm

    return {
        name: value.detach().clone().contiguous()
        for name, value in to_timm(own_weights(), ViTConfig(**TINY)).items()
    }


STRANGE = {
    "whole numbers": lambda w, _: w | {"head.weight": torch.ones(10, 8, dtype=torch.int64)},
    "yes and no": lambda w, _: w | {"head.weight": torch.ones(10, 8, dtype=torch.bool)},
    "complex numbers": lambda w, _: w | {"head.weight": torch.ones(10, 8, dtype=torch.complex64)},
    "positions without a dimension": lambda w, _: w | {"position.table": torch.ones(())},
    "positions with three": lambda w, _: w | {"position.table": torch.ones(1, 16, 8)},
    "positions of another width": lambda w, _: w | {"position.table": torch.ones(25, 9)},
    "positions that form no square": lambda w, _: w | {"position.table": torch.ones(17, 8)},
    "no positions at all": lambda w, _: w | {"position.table": torch.ones(0, 8)},
    "names that clear the screen": lambda w, _: w | {"\x1b[2J\nroot: all is well": torch.ones(1)},
    "a name of a megabyte": lambda w, _: w | {"x" * (1 << 20): torch.ones(1)},
    "an empty name": lambda w, _: w | {"": torch.ones(1)},
    "timm: a token without width": lambda _, t: t | {"cls_token": torch.ones(8)},
    "timm: a token of another width": lambda _, t: t | {"cls_token": torch.ones(1, 1, 9)},
    "timm: two tokens that differ": lambda _, t: t | {"dist_token": torch.ones(1, 1, 9)},
    "timm: flat positions": lambda _, t: t | {"pos_embed": torch.ones(17 * 8)},
    "timm: a projection in one dimension": lambda _, t: t | {"patch_embed.proj.weight": torch.ones(8)},
    "timm: registers without a batch": lambda _, t: t | {"reg_token": torch.ones(8)},
    "timm: a block that is not a number": lambda _, t: (
        t | {"blocks.9999999999999.norm1.weight": torch.ones(8)}
    ),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_that_do_not_belong_are_refused_in_one_line(kind, place):
    save_file(STRANGE[kind](own_weights(), timm_weights()), place / "model.safetensors")
    with pytest.raises(FathomsError) as caught:
        fathoms.load_weights(ViT(ViTConfig(**TINY)), place / "model.safetensors")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2500


def run_folder(place: Path, **model) -> Path:
    """A run folder with the weights of a tiny model, whose config says `model` about it."""
    from fathoms.training.run_folder import to_toml

    (place / "run" / "checkpoints" / "last").mkdir(parents=True)
    fathoms.save_weights(ViT(ViTConfig(**TINY)), place / "run" / "checkpoints" / "last" / "model.safetensors")
    table = {"data": "digits", "classes": list("0123456789"), "model": {**TINY, **model}, "recipe": {}}
    (place / "run" / "config.toml").write_text(to_toml(table))
    return place / "run"


GIANTS = {
    "dim": ({"dim": 65_536}, "describes a model of"),
    "depth": ({"depth": 10_000}, "too few for a model of 10000 blocks"),
    "grid": ({"image_size": 65_536, "position": "sincos"}, "describes a model of"),
    "rotations": ({"image_size": 65_536, "position": "rope"}, "describes a model of"),
    "beyond": ({"depth": 999_999_999}, "depth=999999999 is too large"),
    "far beyond": ({"depth": 10**30}, "an integer of more than 64 bits"),
}


def test_a_config_cannot_ask_for_a_model_that_its_weights_do_not_fill(place, bounded, one_line):
    lines, says = [], []
    for name, (changes, message) in GIANTS.items():
        (place / name).mkdir()
        folder = run_folder(place / name, **changes)
        lines.append(["validate", "--checkpoint", str(folder), "--device", "cpu"])
        says.append(message)
    (place / "fine").mkdir()
    lines.append(["validate", "--checkpoint", str(run_folder(place / "fine")), "--device", "cpu", "--json"])
    *report, fine = bounded(*lines)
    for result, message in zip(report, says, strict=True):
        one_line(result, message)
    assert fine["code"] == 0, fine
