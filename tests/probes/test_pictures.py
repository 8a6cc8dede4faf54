"""Pictures show the numbers that they were given, in both formats."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.drawing.colours import PALETTE
from fathoms.probes.pictures.attention import attention_by_head
from fathoms.probes.pictures.depth_profile import depth_profile
from fathoms.probes.pictures.plot import Panel, Series, grid_of
from fathoms.probes.pictures.weights import centre_and_corners, filter_picture, scale_picture
from fathoms.probes.signal import probe

CONFIG = ViTConfig(image_size=8, patch_size=2, in_channels=1, dim=12, heads=3, depth=3, num_classes=4)


def model(**options):
    torch.manual_seed(0)
    return ViT(CONFIG.replace(**options)).eval()


def test_a_line_is_at_the_same_place_in_svg_and_png():
    panel = Panel("title <&>", "x", [Series("a", [(0, 1.0), (1, 10.0)])], log_y=True)
    picture = grid_of([panel], "whole", columns=1)
    svg = picture.svg()
    assert "title &lt;&amp;&gt;" in svg
    x, y = (
        float(v)
        for v in re.findall(rf'polyline points="([\d.,]+) [^"]*" fill="none" stroke="{PALETTE[0]}"', svg)[
            0
        ].split(",")
    )
    image = np.asarray(Image.open(io.BytesIO(picture.png())).convert("RGB"), int)
    wanted = [int(PALETTE[0][k : k + 2], 16) for k in (1, 3, 5)]
    near = image[int(2 * y) - 3 : int(2 * y) + 4, int(2 * x) - 3 : int(2 * x) + 4]
    assert np.abs(near - wanted).sum(-1).min() < 40
    assert image.shape == (2 * picture.height, 2 * picture.width, 3)


def test_a_value_of_zero_on_a_logarithmic_axis_breaks_the_line():
    panel = Panel("t", "x", [Series("", [(0, 1.0), (1, 2.0), (2, 0.0), (3, 3.0), (4, 4.0)])], log_y=True)
    assert grid_of([panel], "w").svg().count(f'stroke="{PALETTE[0]}"') == 2
    empty = Panel("t", "x", [Series("", [(0, 0.0)])], log_y=True)
    assert "nothing to show" in grid_of([empty], "w").svg()


def test_the_data_of_a_profile_are_those_of_the_probe(tmp_path):
    signal = probe(model(), torch.randn(2, 1, 8, 8))
    signal.figure(tmp_path / "a.png")
    stored = json.loads(signal.figure(tmp_path / "a.json").read_text())[""]
    assert [site["ratio"] for site in stored] == [site.ratio for site in signal]
    with pytest.raises(FathomsError, match=r"pictures are written as \.svg, \.png or \.json"):
        signal.figure(tmp_path / "a.pdf")


def test_a_profile_of_several_models_has_a_line_for_each():
    sites = probe(model(), torch.randn(2, 1, 8, 8)).to_json()["sites"]
    svg = depth_profile({"one": sites, "two": sites}).svg()
    assert svg.count(">one<") == svg.count(">two<") == 1


def test_centre_and_corners_of_a_patch():
    values = np.zeros((8, 8))
    values[2:6, 2:6] = 3.0
    values[:2, :2] = values[-2:, -2:] = -1.0
    assert centre_and_corners(values) == (3.0, 0.5)


def test_the_scale_picture_holds_every_gamma_and_models_without_one_have_none():
    made = scale_picture(model(residual="layerscale", residual_init=0.5))
    assert made.data["mlp"]["blocks.2"] == [0.5] * 12
    assert scale_picture(model()) is None


def test_filters_are_laid_out_as_the_patch_is():
    vit = model()
    with torch.no_grad():
        vit.stem.proj.weight.zero_()
        vit.stem.proj.weight[3] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made = filter_picture(vit)
    assert made.data["order"][0] == 3
    assert made.data["filters"][0] == [[[1.0, 2.0], [3.0, 4.0]]]


def test_attention_by_head_is_that_of_the_class_token():
    vit = model(attention="softmax")
    image = torch.randn(1, 8, 8)
    found = attention_by_head(vit, image)
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2"]
    with torch.no_grad():
        tokens = vit.embed(image[None])
        q, k, _ = vit.blocks[0].attn.project(vit.blocks[0].attn_join.enter(tokens), None)
        probs = (q @ k.mT / 2.0).softmax(-1)[0, :, 0, 1:]
    expected = (probs / probs.sum(-1, keepdim=True)).unflatten(-1, (4, 4))
    torch.testing.assert_close(found["blocks.0"], expected)


def test_class_attention_is_drawn_by_head_too():
    found = attention_by_head(model(readout="class_attention"), torch.randn(1, 8, 8))
    assert found["readout.blocks.1"].shape == (3, 4, 4)
    assert found["readout.blocks.1"].sum((1, 2)).tolist() == pytest.approx([1.0] * 3)


def test_few_blocks_have_whole_numbers_on_their_axis():
    line = Series("", [(0, 0.5), (1, 0.6), (2, 0.7)])
    labels = re.findall(
        r">([\d.,]+)</text>", grid_of([Panel("", "block", [line], y_range=(0.5, 0.7))], "").svg()
    )
    assert [text for text in labels if "." not in text] == ["0", "1", "2"]
    assert "1.5" not in labels
