"""The card of an export is enough: Pillow, numpy and onnxruntime give the probabilities of `fathoms predict`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fathoms import ViT, ViTConfig, save_weights
from fathoms.cli.main import main

SIZES = {"image_size": 160, "patch_size": 32, "dim": 24, "heads": 3, "depth": 1, "num_classes": 4}
NAMES = ["cat", "dog", "hen", "🐶"]


def by_hand(card, folder, image):
    """Class names and probabilities from the card alone; nothing of fathoms is used."""
    import onnxruntime

    steps = card["preprocessing"]
    filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
    with Image.open(image) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGB")
    if card["input"][0] == 1:
        grey = np.rint(np.asarray(picture, np.float64).mean(axis=2)).astype(np.uint8)
        picture = Image.fromarray(grey).convert("RGB")
    width, height = picture.size
    short, size = steps["resize_shorter_side"], steps["crop"][0]
    scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    picture = picture.resize(scaled, filters[steps["interpolation"]])
    left, top = (round((side - size) / 2) for side in scaled)
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)), np.float32) / steps["divide_by"]
    channels = card["input"][0]
    pixels = pixels[:, :, :channels]
    pixels = (pixels - np.float32(steps["mean"][:channels])) / np.float32(steps["std"][:channels])
    session = onnxruntime.InferenceSession(folder / card["file"])
    (logits,) = session.run(["logits"], {"images": pixels.transpose(2, 0, 1)[None]})
    odds = np.exp(logits[0] - logits[0].max())
    return dict(zip(card["classes"], odds / odds.sum(), strict=True))


def photo(path, height, width, **options):
    """A smooth photograph-like picture; noise would make every filter's rounding visible."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (9 + k)) + np.cos(columns / (13 - k)) for k in range(3)]
    Image.fromarray((np.stack(waves, 2) * 60 + 128).astype(np.uint8)).save(path, **options)
    return path


def predicted(capsys, image, checkpoint):
    capsys.readouterr()
    assert main(["predict", str(image), "--checkpoint", str(checkpoint), "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["predictions"]
    return dict(zip(row["classes"], row["probabilities"], strict=True))


def close(one, other):
    return one.keys() >= other.keys() and max(abs(one[name] - other[name]) for name in other) < 1e-4


@pytest.fixture
def weights(tmp_path):
    """A model of 160 pixels with strong weights, so that every pixel moves its probabilities."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    save_weights(model, tmp_path / "weights.safetensors")
    card = {"config": model.config.to_dict(), "model": "vit", "classes": NAMES}
    (tmp_path / "weights.safetensors.json").write_text(json.dumps(card))
    return tmp_path / "weights.safetensors"


@pytest.mark.compile
def test_a_card_alone_gives_the_probabilities_of_predict(weights, tmp_path, capsys):
    exported = tmp_path / "out" / "model.onnx"
    exported.parent.mkdir()
    assert main(["export", str(weights), "--output", str(exported)]) == 0
    card = json.loads((exported.parent / "model.onnx.json").read_text())
    assert (card["preprocessing"]["crop_pct"], card["preprocessing"]["resize_shorter_side"]) == (0.9, 177)
    turned = Image.Exif()
    turned[0x0112] = 6
    images = [
        photo(tmp_path / "wide.png", 220, 301),
        photo(tmp_path / "tall.jpg", 333, 201, quality=95, exif=turned),
        photo(tmp_path / "small.png", 40, 50),
    ]
    seen = []
    for image in images:
        expected = predicted(capsys, image, weights)
        assert close(by_hand(card, exported.parent, image), expected)
        # The file, and the folder that holds nothing else, are models for predict too.
        assert close(predicted(capsys, image, exported), expected)
        assert close(predicted(capsys, image, exported.parent), expected)
        seen.append(expected)
    assert not close(seen[0], seen[1])


@pytest.mark.compile
def test_a_card_of_a_grey_run_gives_them_too(digits_run, tmp_path, capsys):
    exported = tmp_path / "model.onnx"
    assert main(["export", str(digits_run), "--fold", "--output", str(exported)]) == 0
    card = json.loads((tmp_path / "model.onnx.json").read_text())
    assert card["preprocessing"]["crop_pct"] == 1.0
    image = photo(tmp_path / "digit.png", 16, 20)
    assert close(by_hand(card, tmp_path, image), predicted(capsys, image, digits_run))


def test_the_markdown_lists_every_step(weights, tmp_path):
    exported = tmp_path / "model.safetensors"
    assert main(["export", str(weights), "--format", "safetensors", "--output", str(exported)]) == 0
    text = (tmp_path / "model.safetensors.md").read_text()
    assert text.startswith("# model.safetensors: ")
    assert "`fathoms predict PHOTOS --checkpoint model.safetensors`" in text
    for row in (
        "| crop_pct | 0.9 |",
        "| resize_shorter_side | 177 |",
        "| crop | [160, 160] |",
        "| interpolation | bicubic |",
        "| mean | (0.485, 0.456, 0.406) |",
        "| step 3 | cut the 160 x 160 pixels in the middle |",
    ):
        assert row in text
    assert "cat, dog, hen, 🐶" in text
