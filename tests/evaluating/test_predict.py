"""Images in, classes out, and attention maps drawn over them."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fathoms import FathomsError, create_model
from fathoms.cli import predict as command
from fathoms.cli.flags.parse import parse
from fathoms.data import LoaderOptions
from fathoms.data.sources.splits import open_held_out
from fathoms.evaluating.predict import class_names, predict
from fathoms.evaluating.preprocessing import Preprocessing, eval_loader
from fathoms.exporting.verified_export import export_model
from fathoms.probes.probe_figures import overlay_figure

DIGITS = {"num_classes": 10, "depth": 2}


def model(**more):
    torch.manual_seed(0)
    return create_model("vit_digits", **DIGITS | more).eval()


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(0)
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b.jpg"):
        pixels = generator.integers(0, 255, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / name)
    export_model(model(), tmp_path / "w.safetensors", "safetensors")
    return tmp_path


def predicted(folder, *more):
    words = [str(folder / "photos"), "--checkpoint", str(folder / "w.safetensors")]
    return command.run(parse(command, "predict", [*words, *more]))


def test_a_folder_is_classified_with_names(folder, capsys):
    (folder / "names.txt").write_text("\n".join(f"digit {i}" for i in range(10)))
    assert predicted(folder, "--classes", str(folder / "names.txt"), "--top", "3") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("image  ")
    assert header.endswith("class 3")
    assert len(lines) == 2
    assert re.search(r"a\.png +digit \d", lines[0])
    assert lines[0].count("%") == 3


def test_json_has_every_image_and_a_bad_one_is_named(folder, capsys):
    (folder / "photos" / "c.png").write_bytes(b"not an image")
    assert predicted(folder, "--json", "--batch-size", "2") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["bad"] == 1
    assert [bool(row["problem"]) for row in report["predictions"]] == [False, True, False]
    good = report["predictions"][0]
    assert len(good["classes"]) == 5
    assert good["probabilities"] == sorted(good["probabilities"], reverse=True)


def test_overlays_are_written(folder):
    assert predicted(folder, "--attention", str(folder / "maps")) == 0
    names = sorted(path.name for path in (folder / "maps").iterdir())
    assert names == ["000000-a.png", "000001-b.png"]
    with Image.open(folder / "maps" / names[0]) as drawn:
        assert drawn.width > 2 * 448
        assert drawn.height > 448


def test_an_attention_image_has_the_original_the_map_and_a_scale():
    pixels, attention = np.full((32, 40, 3), 0.5), np.full((4, 4), 0.02)
    attention[0, 3] = 0.7
    plain, mapped, scale = overlay_figure(pixels, attention, "Siamese 97.1%").axes
    assert (plain.images[0].get_array() == 0.5).all(), "the original is not darkened"
    assert plain.get_title("left") == "Siamese 97.1%"
    _, shares = mapped.images
    assert (shares.get_array() == attention).all()
    assert shares.get_extent() == [-0.5, 39.5, 31.5, -0.5], "the map covers the image"
    assert scale.get_ylim() == (0, 0.7)
    assert scale.lines[-1].get_ydata() == [1 / 16, 1 / 16]


def test_a_grey_model_sees_a_colour_image_as_the_grey_one_it_was_trained_on(folder):
    """Three equal channels, normalised each by its own numbers, of which training takes the first."""
    pixels = np.repeat(np.random.default_rng(0).integers(0, 255, (8, 8, 1), dtype=np.uint8), 3, 2)
    Image.fromarray(pixels).save(folder / "grey.png")
    preprocessing = Preprocessing(crop_pct=1.0, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    (row,) = predict(
        model(),
        [folder / "grey.png"],
        classes=[str(i) for i in range(10)],
        preprocessing=preprocessing,
        attention=True,
    )
    images = (torch.from_numpy(pixels[None, None, :, :, 0]) / 255 - 0.1) / 0.5
    assert row.probabilities == pytest.approx(model()(images).softmax(-1).topk(5).values[0].tolist())


def test_a_model_of_one_channel_sees_the_same_grey_in_training_validation_and_prediction(tmp_path, tiny_runs):
    pixels = np.load(tiny_runs.data)["x_val"]
    grey = torch.from_numpy(np.rint(pixels.astype(float).mean(-1))).float() / 255
    trainer = tiny_runs.trainer("--in-channels", "1", "--hflip", "0", "--crop", "whole")
    seen = next(iter(trainer.context.data.val.epoch(0))).images[:, 0]
    # The recipe's mean and std are 0.5.
    torch.testing.assert_close(seen, ((grey - 0.5) / 0.5)[: len(seen)], atol=1e-5, rtol=0)
    batch = next(iter(trainer.context.data.train.epoch(0)))
    source = torch.from_numpy(np.load(tiny_runs.data)["x_train"][batch.ids]).double()
    torch.testing.assert_close(
        batch.images[:, 0] * 0.5 + 0.5, source.mean(-1).float() / 255, atol=0.002, rtol=0
    )
    for place in ("a", "b"):
        (tmp_path / "photos" / "val" / place).mkdir(parents=True)
        Image.fromarray(pixels[ord(place) % 7]).save(tmp_path / "photos" / "val" / place / "1.png")
    preprocessing = Preprocessing(crop_pct=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    files = sorted((tmp_path / "photos").rglob("*.png"))
    model = trainer.model.eval()
    rows = predict(model, files, classes="abcd", top=1, preprocessing=preprocessing)
    options = LoaderOptions(grey=True)
    batches = eval_loader(open_held_out(str(tmp_path / "photos")), 16, 2, preprocessing, options=options)
    with torch.no_grad():
        expected = model(next(iter(batches.epoch(0))).images[:, :1]).softmax(-1).amax(-1)
    assert [row.probabilities[0] for row in rows] == pytest.approx(expected.tolist(), abs=1e-6)


def test_mistakes_are_said(tmp_path, folder):
    (folder / "w.safetensors.json").write_text("{}")
    with pytest.raises(FathomsError, match="is not the card of an exported model; it has no config"):
        predicted(folder)
    (folder / "w.safetensors.json").unlink()
    # Without the header in which fathoms records the model.
    save_file(load_file(folder / "w.safetensors"), folder / "w.safetensors")
    with pytest.raises(
        FathomsError, match="a weights file alone does not say which model it is; give --model"
    ):
        predicted(folder)
    tmp_path = folder / "other"
    tmp_path.mkdir()
    with pytest.raises(FathomsError, match="no such file or folder"):
        predicted(tmp_path)
    (tmp_path / "photos").mkdir()
    shutil.copy(folder / "w.safetensors", tmp_path)
    # Not a format that is decoded, and a file that is hidden.
    (tmp_path / "photos" / "scan.heic").write_bytes(b"II")
    (tmp_path / "photos" / "._a.png").write_bytes(b"")
    with pytest.raises(FathomsError, match="no image"):
        predicted(tmp_path)
    (tmp_path / "names.txt").write_text("one\ntwo\n")
    with pytest.raises(FathomsError, match="2 names for 10 classes; give one per line"):
        class_names(tmp_path / "names.txt", None, 10)
